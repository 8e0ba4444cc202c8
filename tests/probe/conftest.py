"""The trained tiny pair, its target's answers to eight held-out questions, and a scorer that
the tests share.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from tasks import KINDS, Kind, examples

from tests.tiny import build_tiny
from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.probe.record import ProbeRecording, record
from trt_eagle3.probe.score import Scorer, draft_ids
from trt_eagle3.prompts.prompt_file import Question

STEPS, NUM_QUESTIONS = 3, 8


@dataclass(frozen=True)
class Asked:
    """An engine whose target has answered."""

    bundle: LoadedBundle
    manifest: DraftManifest
    recordings: list[ProbeRecording]
    scorer: Scorer


def questions(count: int, kinds: tuple[Kind, ...] = KINDS) -> list[Question]:
    """Held-out questions of the tiny pair's world."""
    drawn = examples("heldout", 7, count, kinds)
    return [Question(e.prompt, e.images, [list(e.frames)] if e.frames else []) for e in drawn]


def ask(bundle: LoadedBundle, asked: list[Question], folder: Path, max_tokens: int = 96) -> Asked:
    """Record the target's answers, all layers tapped."""
    manifest = bundle.manifest
    assert manifest is not None
    layers = range(bundle.spec.num_layers)
    recordings = record(bundle, asked, layers, draft_ids(manifest), max_tokens=max_tokens)
    return Asked(bundle, manifest, recordings, Scorer(bundle, recordings, folder))


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    folder = tmp_path_factory.mktemp("probe")
    bundle = LoadedBundle.open(build_tiny(folder, speculation={"steps": STEPS}))
    return ask(bundle, questions(NUM_QUESTIONS), folder)
