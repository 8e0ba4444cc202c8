"""What is recording of recorded runs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trt_eagle3.decode.request.vision_encoder import PatchBuckets, VisionRunner
from trt_eagle3.engine.runtime.session import Session
from trt_eagle3.families.qwen3_vl.vision_rows import padded_rows, vision_rows
from trt_eagle3.parity.record.answers import without_padding
from trt_eagle3.parity.record.engine import Recording, RecordingSession
from trt_eagle3.spec import StateSpec


class _Tower(Session):
    """A visual token is the sum of its patches; one deepstack level."""

    states: tuple[StateSpec, ...] = ()

    def bind(self, name: str, tensor: Tensor) -> None:
        raise AssertionError(name, tensor)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        embeds = inputs["patches"].unflatten(0, (-1, 4)).sum(1)
        return {"visual_embeds": embeds, "deepstack": embeds[None]}


def test_recorded_vision_run_without_its_bucket_is_what_was_asked() -> None:
    rows = vision_rows(torch.tensor([[1, 10, 20], [2, 4, 10]]), 2, 4).inputs()
    patches = torch.randn(280, 3)
    recording = Recording()
    session = RecordingSession(_Tower(), "vision", recording)
    runner = VisionRunner(session, merge_size=2, buckets=PatchBuckets(4096, 4, padded_rows))
    embeds, levels = runner.forward(patches, rows)
    assert recording.forwards[0].inputs["patches"].shape[0] == 320
    run = without_padding(recording.forwards[0], rows, 280, 4)
    assert run.inputs.keys() == {"patches", *rows}
    assert torch.equal(run.inputs["patches"], patches)
    for name, value in rows.items():
        assert torch.equal(run.inputs[name], value), name
    assert torch.equal(run.outputs["visual_embeds"], embeds)
    assert levels is not None
    assert torch.equal(run.outputs["deepstack"], levels)
