"""The vision tower as prompts call it: padded to buckets, its outputs copied."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from trt_eagle3.decode.request.vision_encoder import PatchBuckets, VisionRunner
from trt_eagle3.engine.runtime.session import Session
from trt_eagle3.families.qwen3_vl.vision_rows import padded_rows, vision_rows
from trt_eagle3.spec import StateSpec


class _Static(Session):
    """A graph whose outputs are always the same memory."""

    def __init__(self) -> None:
        self.outputs = {"visual_embeds": torch.zeros(2, 3), "deepstack": torch.zeros(1, 2, 3)}

    states: tuple[StateSpec, ...] = ()

    def bind(self, name: str, tensor: Tensor) -> None:
        raise AssertionError(name, tensor)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for tensor in self.outputs.values():
            tensor.fill_(float(inputs["patches"][0, 0]))
        return dict(self.outputs)


def test_what_the_vision_tower_made_stays_when_it_runs_again() -> None:
    runner = VisionRunner(_Static(), merge_size=2)
    embeds, visual_levels = runner.forward(torch.full((8, 4), 1.0), {})
    runner.forward(torch.full((8, 4), 2.0), {})
    assert visual_levels is not None
    assert (embeds == 1).all()
    assert (visual_levels == 1).all()


class _Recording(Session):
    """A graph that keeps what it was given; a visual token is the sum of its patches."""

    def __init__(self) -> None:
        self.given: dict[str, Tensor] = {}

    states: tuple[StateSpec, ...] = ()

    def bind(self, name: str, tensor: Tensor) -> None:
        raise AssertionError(name, tensor)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.given = dict(inputs)
        return {"visual_embeds": inputs["patches"].unflatten(0, (-1, 4)).sum(1)}


def test_vision_runner_pads_to_a_bucket_and_returns_what_was_asked() -> None:
    session = _Recording()
    runner = VisionRunner(session, merge_size=2, buckets=PatchBuckets(4096, 4, padded_rows))
    patches = torch.randn(600, 3)
    rows = vision_rows(torch.tensor([[1, 10, 20], [2, 10, 20]]), 2, 4).inputs()
    embeds, levels = runner.forward(patches, rows)
    assert levels is None
    assert torch.equal(embeds, patches.unflatten(0, (-1, 4)).sum(1))
    assert session.given["patches"].shape == (640, 3)
    assert session.given["frame_starts"].tolist() == [0, 200, 400, 600, 640]
    assert session.given["rope_positions"].shape == (2, 640)


@pytest.mark.parametrize(
    ("count", "limit", "padded"), [(600, 616, 616), (600, 600, 600), (4000, 4096, 4000)]
)
def test_vision_runner_pads_no_further_than_the_limit_and_no_large_images(
    count: int, limit: int, padded: int
) -> None:
    session = _Recording()
    rows = vision_rows(torch.tensor([[1, 2, count // 2]]), 2, 4).inputs()
    buckets = PatchBuckets(limit, 4, padded_rows)
    VisionRunner(session, merge_size=2, buckets=buckets).forward(torch.randn(count, 3), rows)
    assert session.given["patches"].shape[0] == padded
    assert session.given["frame_starts"].tolist() == [0, count, padded]
