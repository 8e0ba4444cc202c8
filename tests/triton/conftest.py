"""A bundle of the tiny pair for serving, what it answers offline, and one server for the tests
of a module.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import ROOT, build_tiny
from tests.triton.server import Server, data_uri
from trt_eagle3.decode.llm import LLM, load
from trt_eagle3.decode.request.request import Generation
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.triton.repository import deploy

IMAGES = ROOT / "examples/tiny/images"


@dataclass(frozen=True)
class Case:
    """The same question for a server and for ``LLM.generate``."""

    inputs: dict[str, Any]
    prompt: Any
    options: dict[str, Any] = field(default_factory=dict)


def _uris(*names: str) -> list[str]:
    return [data_uri((IMAGES / name).read_bytes()) for name in names]


def _cases() -> dict[str, Case]:
    see, sums, changed = (
        "What do you see in this image?",
        "What is 12 plus 30?",
        "What changed between the two images?",
    )
    frames = [f"frames/{i}.png" for i in range(4)]
    turns = [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": _uris("scene.png")[0]}}, see],
        },
        {"role": "assistant", "content": "The background is black."},
        {"role": "user", "content": sums},
    ]
    sampled = {"temperature": 0.75, "top_p": 0.75, "top_k": 20, "seed": 2**63 + 5}
    return {
        "text": Case({"text_input": sums}, sums),
        "image": Case(
            {"text_input": see, "image_url": _uris("scene.png")},
            see,
            {"images": [IMAGES / "scene.png"]},
        ),
        "two images": Case(
            {"text_input": changed, "image_url": _uris("before.png", "after.png")},
            changed,
            {"images": [IMAGES / "before.png", IMAGES / "after.png"]},
        ),
        "video": Case(
            {"text_input": "Describe the video.", "video": json.dumps(_uris(*frames))},
            "Describe the video.",
            {"videos": [IMAGES / "frames"]},
        ),
        "messages": Case({"messages": json.dumps(turns)}, turns),
        "sampled": Case(
            {"text_input": see, "image_url": _uris("scene.png"), **sampled},
            see,
            {"images": [IMAGES / "scene.png"], "sampling": SamplingParams(**sampled)},
        ),
        "plain": Case({"text_input": sums, "speculation": False}, sums, {"speculation": False}),
        "length": Case(
            {"text_input": sums, "max_tokens": 5, "ignore_eos": True},
            sums,
            {"max_tokens": 5, "ignore_eos": True},
        ),
        "stop words": Case(
            {"text_input": sums, "stop_words": ["equals", "plus"]},
            sums,
            {"stop": ["equals", "plus"]},
        ),
    }


CASES = _cases()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    limits = {"max_batch_size": 8, "max_waiting": 64, "max_seq_len": 4096, "max_kv_tokens": 8192}
    return build_tiny(tmp_path_factory.mktemp("engines"), limits=limits)


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[LLM]:
    engine = load(bundle)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def offline(engine: LLM) -> dict[str, Generation]:
    """What ``generate`` answers to each case."""
    return {name: engine.generate(case.prompt, **case.options) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("triton") / "repository"
    deploy(bundle, repository, serving={"stream_interval_s": 0})
    with Server(repository) as server:
        yield server
