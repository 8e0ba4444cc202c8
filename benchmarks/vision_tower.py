"""A vision tower of a published geometry with random weights: graphs, images, expected outputs.

Shapes: n patches of all images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from torch import Tensor

from benchmarks.drawn_weights import draw_weight, read_drawn
from benchmarks.synthetic import target_model
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.engine.bundle.record import REFERENCE_ROOT, reference_location
from trt_eagle3.engine.runtime.session import Session
from trt_eagle3.engine.torch.session import TorchSession
from trt_eagle3.families.internvl.reference import tiles_from_patches
from trt_eagle3.families.internvl.tower import tiles_of
from trt_eagle3.families.qwen2_5_vl.tower import windows_of
from trt_eagle3.families.registry import tower_of
from trt_eagle3.parity.metrics import relative_error

__all__ = ["ImageBatch", "Tower", "TransformersTower", "tower_flops"]

_TEXT_LAYERS = 3  # decoder layers of a model for its tower: at least the number of visual levels
_MATRIX_OF_TILES = 3  # axes of InternViT's class token and positions; convolutions have more


@dataclass(frozen=True)
class ImageBatch:
    """``count`` square images of ``side`` pixels."""

    count: int
    side: int

    def __str__(self) -> str:
        return f"{self.side}^2" if self.count == 1 else f"{self.count} x {self.side}^2"

    def grids(self, spec: TargetCheckpoint) -> Tensor:
        """Return the images' grids, int64 [count, 3].

        InternVL's image is cut into tiles that hold all of its pixels, and has a thumbnail. The
        side of another family's image is rounded down to whole visual tokens.
        """
        vision = spec.require_vision()
        if spec.family == "internvl":
            side = tiles_of(vision).side
            tiles = (-(-self.side // (side * vision.patch_size))) ** 2
            grid = [tiles + (tiles > 1), side, side]
        else:
            merge = vision.spatial_merge_size
            side = self.side // (merge * vision.patch_size) * merge
            grid = [1, side, side]
        return torch.tensor([grid] * self.count)

    def patches(self, spec: TargetCheckpoint) -> int:
        """Return the patches of all images."""
        return int(self.grids(spec).prod(1).sum())


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
        return tower_of(self.spec).graph(self.spec, dtype, reference_location)

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
        vision, grids = self.spec.require_vision(), images.grids(self.spec)
        rows = tower_of(self.spec).inputs(vision, grids)
        generator = torch.Generator(self._device).manual_seed(images.count * images.side)
        shape = (images.patches(self.spec), vision.patch_dim)
        patches = torch.randn(shape, generator=generator, device=self._device).half()
        named = {"patches": patches.to(dtype), **rows}
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

    def embeds_error(self, embeds: Tensor, images: ImageBatch) -> float:
        """Return the relative error of visual embeddings [N, H]."""
        return relative_error(embeds.float(), self._expected[images]["visual_embeds"])


class TransformersTower:
    """The same tower in transformers, with ``sdpa`` attention; ``size``: of ``target_sizes``."""

    def __init__(self, spec: TargetCheckpoint, size: str, dtype: str, device: str = "cuda") -> None:
        config, model_class = target_model(size, num_layers=_TEXT_LAYERS)
        with torch.device(device):
            model = model_class._from_config(
                config, dtype=getattr(torch, dtype), attn_implementation="sdpa"
            ).eval()
        for name, parameter in model.named_parameters():
            if "language_model" not in name and not name.startswith("lm_head"):
                parameter.copy_(_drawn_as_stored(name, parameter, device))
        self._spec, self._model, self._config = spec, model.model, config.vision_config

    def run(self, patches: Tensor, grid_thw: Tensor) -> Callable[[], Tensor]:
        """Return a run over ``patches`` [n, patch_dim], which returns embeddings [N, H]."""
        if self._spec.family == "internvl":
            merge = self._spec.require_vision().spatial_merge_size
            pixels = tiles_from_patches(patches, grid_thw, self._config, merge)
            features = self._model.get_image_features
            return lambda: features(pixels, return_dict=True).pooler_output.flatten(0, 1)
        grids = grid_thw.to(patches.device)
        return lambda: self._model.visual(patches, grid_thw=grids).pooler_output


def _drawn_as_stored(name: str, like: Tensor, device: str) -> Tensor:
    """Draw a tensor of the checkpoint. A convolution's kernel is a row of our product."""
    shape = like.flatten(1).shape if like.ndim > _MATRIX_OF_TILES else like.shape
    return draw_weight(name, shape, device).reshape(like.shape)


def tower_flops(spec: TargetCheckpoint, grid_thw: Tensor) -> float:
    """Return floating-point operations of matrix products over images, attention included.

    ``grid_thw``: int64 [G, 3], as ``FamilyVision.inputs`` takes it.
    """
    vision = spec.require_vision()
    rows = tower_of(spec).inputs(vision, grid_thw)
    frames, windows = (
        rows[name].long().diff() if name in rows else None
        for name in ("frame_starts", "window_starts")
    )
    assert frames is not None
    hidden, out = vision.hidden_size, vision.out_hidden_size
    joined, patches = hidden * vision.spatial_merge_size**2, int(grid_thw.prod(1).sum())
    tokens, num_rows = patches // vision.spatial_merge_size**2, int(frames.sum())
    products = 2 if windows is None else 3  # of the MLP
    layers = 2.0 * num_rows * hidden * (4 * hidden + products * vision.intermediate_size)
    full = vision.depth if windows is None else len(windows_of(vision).full_blocks)
    attended = full * int(frames.square().sum())
    if windows is not None:
        attended += (vision.depth - full) * int(windows.square().sum())
    inner = out if spec.family == "internvl" else joined
    mergers = (1 + len(vision.level_blocks)) * 2.0 * tokens * (joined * inner + inner * out)
    embedding = 2.0 * patches * vision.patch_dim * hidden
    return embedding + vision.depth * layers + 4.0 * hidden * attended + mergers
