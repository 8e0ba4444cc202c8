"""CUDA graphs of sets of input shapes that come again, for the sessions that run on CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["CAPTURE_AFTER", "MAX_CAPTURED", "Captured", "Shapes", "shapes_of"]

CAPTURE_AFTER = 2  # runs of the same shapes before they are captured: prompts seldom repeat theirs, decode steps do
MAX_CAPTURED = 64

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def shapes_of(inputs: Mapping[str, Tensor]) -> Shapes:
    """What tells one set of input shapes from another."""
    return tuple(sorted((name, tuple(tensor.shape)) for name, tensor in inputs.items()))


@dataclass(frozen=True)
class Captured:
    """A CUDA graph of one set of input shapes, with the buffers that it reads and writes.

    ``keep``: what must live as long as the graph does.
    """

    graph: torch.cuda.CUDAGraph
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    keep: object = None
    _last: dict[str, Tensor] = field(default_factory=dict)

    def fill(self, inputs: Mapping[str, Tensor]) -> None:
        """Copy ``inputs`` into the graph's; those from the host only where they differ from the last run's."""
        for name, tensor in inputs.items():
            if tensor.device.type == "cpu":
                last = self._last.get(name)
                if last is not None and torch.equal(last, tensor):
                    continue
                self._last[name] = tensor.clone()  # the caller may write into its own again
            else:
                self._last.pop(name, None)
            self.inputs[name].copy_(tensor, non_blocking=True)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Replay over ``inputs``; the outputs are the graph's own, which the next replay overwrites."""
        self.fill(inputs)
        self.graph.replay()
        return dict(self.outputs)
