"""A vision tower of a published geometry with random weights: graphs, images, expected outputs.

Shapes: n patches of all images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from torch import Tensor

from benchmarks.drawn_weights import read_drawn
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.engine.bundle.record import REFERENCE_ROOT, reference_location
from trt_eagle3.engine.runtime.session import Session
from trt_eagle3.engine.torch.session import TorchSession
from trt_eagle3.families.qwen3_vl.vision_graph import vision_graph
from trt_eagle3.families.qwen3_vl.vision_rows import vision_rows
from trt_eagle3.parity.metrics import relative_error
from trt_eagle3.spec import VisionSpec

__all__ = ["ImageBatch", "Tower", "tower_flops"]


@dataclass(frozen=True)
class ImageBatch:
    """``count`` square images of ``side`` pixels."""

    count: int
    side: int

    def __str__(self) -> str:
        return f"{self.side}^2" if self.count == 1 else f"{self.count} x {self.side}^2"

    def patches(self, vision: VisionSpec) -> int:
        """Return the patches of all images."""
        return self.count * (self.side // vision.patch_size) ** 2


class Tower:
    """The tower of ``spec``, with weights drawn by name, and its float32 outputs.

    Args:
        folder: where the graphs are written.
    """

    def __init__(self, spec: TargetCheckpoint, folder: Path, device: str = "cuda") -> None:
        self.spec = spec
        self._folder = folder
        self._device = device
        self._expected: dict[ImageBatch, dict[str, Tensor]] = {}

    def graph(self, dtype: str) -> onnx.ModelProto:
        """Return the vision graph over the checkpoint's weights."""
        return vision_graph(self.spec, dtype, reference_location)

    def session(self, dtype: str) -> TorchSession:
        """Open a torch session over this tower."""
        file = self._folder / f"tower.{dtype}.onnx"
        file.write_bytes(self.graph(dtype).SerializeToString())
        return TorchSession(file, REFERENCE_ROOT, device=self._device, read_weight=read_drawn)

    def inputs(self, images: ImageBatch, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the graph's inputs.

        They are random patches [n, patch_dim] that float16 represents, and the rows of the images'
        grids.
        """
        vision = self.spec.require_vision()
        side = images.side // vision.patch_size
        grid = torch.tensor([[1, side, side]] * images.count)
        rows = vision_rows(
            grid, vision.spatial_merge_size, round(vision.num_position_embeddings**0.5)
        )
        generator = torch.Generator(self._device).manual_seed(images.count * images.side)
        shape = (images.patches(vision), vision.patch_dim)
        patches = torch.randn(shape, generator=generator, device=self._device).half()
        named = {"patches": patches.to(dtype), **rows.inputs()}
        return {name: tensor.to(self._device) for name, tensor in named.items()}

    def expect(self, images: Sequence[ImageBatch]) -> None:
        """Compute the float32 outputs that ``error`` compares with; then release the weights."""
        session = self.session("float32")
        for each in images:
            self._expected[each] = session.run(self.inputs(each, torch.float32))

    def error(self, session: Session, images: ImageBatch, dtype: torch.dtype) -> float:
        """Return the largest relative error of any output (``parity.metrics.relative_error``)."""
        found, expected = session.run(self.inputs(images, dtype)), self._expected[images]
        assert found.keys() == expected.keys(), f"expected {list(expected)}, got {list(found)}"
        return max(relative_error(found[name].float(), value) for name, value in expected.items())


def tower_flops(vision: VisionSpec, frames: Sequence[int]) -> float:
    """Return floating-point operations of matrix products over ``frames``, attention included.

    ``frames``: patches of each frame.
    """
    patches, hidden, joined = (
        sum(frames),
        vision.hidden_size,
        vision.hidden_size * vision.spatial_merge_size**2,
    )
    layer = 2 * patches * hidden * (4 * hidden + 2 * vision.intermediate_size)
    attention = sum(4 * frame * frame * hidden for frame in frames)
    tokens, mergers = patches // vision.spatial_merge_size**2, 1 + len(vision.level_blocks)
    merger = 2 * tokens * joined * (joined + vision.out_hidden_size)
    return (
        2.0 * patches * vision.patch_dim * hidden
        + vision.depth * (layer + attention)
        + mergers * merger
    )
