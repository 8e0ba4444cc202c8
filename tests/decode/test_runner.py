"""Inputs of the graphs, and outputs that the next run must not change."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trt_eagle3.decode.forward.runner import PatchBuckets, VisionRunner, causal_mask
from trt_eagle3.engine.torch.cuda_graph import patch_bucket
from trt_eagle3.families.qwen3_vl.vision_rows import padded_rows, vision_rows
from trt_eagle3.spec import StateSpec


def test_causal_mask_is_its_callers_own() -> None:
    expected = [[True, False, False], [True, True, False], [True, True, True]]
    mask = causal_mask(3)
    assert mask.tolist() == expected
    mask.copy_(torch.zeros(3, 3))
    assert causal_mask(3).tolist() == expected


class _Static:
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


def test_visual_embeddings_stay_when_the_vision_tower_runs_again() -> None:
    runner = VisionRunner(_Static(), merge_size=2)
    embeds, visual_levels = runner.forward(torch.full((8, 4), 1.0), {})
    runner.forward(torch.full((8, 4), 2.0), {})
    assert visual_levels is not None
    assert (embeds == 1).all()
    assert (visual_levels == 1).all()


class _Recording:
    """A graph that records its inputs; a visual token is the sum of its patches."""

    def __init__(self) -> None:
        self.given: dict[str, Tensor] = {}

    states: tuple[StateSpec, ...] = ()

    def bind(self, name: str, tensor: Tensor) -> None:
        raise AssertionError(name, tensor)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.given = dict(inputs)
        return {"visual_embeds": inputs["patches"].unflatten(0, (-1, 4)).sum(1)}


def test_vision_runner_pads_to_a_bucket_and_returns_no_padding() -> None:
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


@given(st.integers(1, 3000))
def test_patch_bucket_holds_the_patches_with_little_to_spare(count: int) -> None:
    bucket = patch_bucket(count)
    assert count <= bucket < count + max(64, count / 8)
    assert patch_bucket(bucket) == bucket
