"""The tiny pair's bundle with a tree, and what it is asked while faults are planted in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.planting import MANIFEST, SPEC
from tests.tiny import ROOT, build_tiny
from trt_eagle3.parity import run, sampling_check
from trt_eagle3.parity.board import GATES
from trt_eagle3.parity.record import RecordingEngine
from trt_eagle3.parity.run import Validation
from trt_eagle3.parity.summary import Found
from trt_eagle3.parity.workload import Case
from trt_eagle3.prompts import Question, read_questions

TREE = {"mode": "tree", "steps": 3, "topk": 3, "num_draft_tokens": 10}
LIMITS = {"max_seq_len": 128, "max_visual_tokens": 64}
MAX_TOKENS = 20


@pytest.fixture(scope="session")
def tree_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose accepted paths leave the first branch now and then."""
    return build_tiny(tmp_path_factory.mktemp("parity"), speculation=TREE, limits=LIMITS)


def case(name: str = "two images") -> Case:
    """Two images of the tiny pair's world, and a question that is not: its draft is right now and then."""
    images = read_questions(ROOT / "examples/tiny/images/questions.json")[1].images
    return Case(name, "images", Question("What changed, and why is the sky so blue in the second?", images))


def without_sampling(patch: pytest.MonkeyPatch) -> None:
    """Leave the gates on sampling out."""
    patch.setattr(run, "sample_cases", lambda *_: [])
    patch.setattr(run, "check_sampling", lambda board, *_: board.skip([g for g in GATES if "sampling" in g], ""))


def inspect(engine: RecordingEngine, patch: pytest.MonkeyPatch, *, sampled: bool = True) -> Found:
    """Validate with one prompt, twice where sampling is looked at; ``sampled``: whether it is."""
    cases = [case(), case("once more")] if sampled else [case()]
    if not sampled:
        without_sampling(patch)
    patch.setattr(sampling_check, "_DRAWS", 1000)
    return Validation(engine).run(cases, MAX_TOKENS, SPEC, MANIFEST)
