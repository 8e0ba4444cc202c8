"""What the graphs are given."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trt_eagle3.decode.runner import VisionRunner, causal_mask


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

    def bind(self, name: str, tensor: Tensor) -> None:
        raise AssertionError(name, tensor)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for tensor in self.outputs.values():
            tensor.fill_(float(inputs["patches"][0, 0]))
        return dict(self.outputs)


def test_what_the_vision_tower_made_stays_when_it_runs_again() -> None:
    runner = VisionRunner(_Static())
    embeds, deepstack = runner.forward(torch.full((8, 4), 1.0), {})
    runner.forward(torch.full((8, 4), 2.0), {})
    assert deepstack is not None
    assert (embeds == 1).all()
    assert (deepstack == 1).all()
