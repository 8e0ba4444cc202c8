"""Qwen2.5-VL's tower: its own settings, and the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trt_eagle3.families.family import TowerSizes, num_values
from trt_eagle3.spec import VisionSpec

__all__ = ["Windows", "tower_sizes", "vision_shapes", "window_side", "windows_of"]


@dataclass(frozen=True)
class Windows:
    """The settings of the tower that only Qwen2.5-VL has.

    Attributes:
        window_size: pixels along a side of a window.
        full_blocks: blocks that attend over a whole frame.
        tokens_per_second: rope positions per second of a video.
    """

    window_size: int
    full_blocks: tuple[int, ...]
    tokens_per_second: int

    def to_own(self) -> Mapping[str, Any]:
        """Convert to ``VisionSpec.own``."""
        return asdict(self)


def windows_of(vision: VisionSpec) -> Windows:
    """Read the values of ``Windows.to_own``."""
    own: Any = vision.own
    return Windows(own["window_size"], tuple(own["full_blocks"]), own["tokens_per_second"])


def window_side(vision: VisionSpec) -> int:
    """Return the visual tokens along a side of a window."""
    side = windows_of(vision).window_size
    return side // vision.spatial_merge_size // vision.patch_size


def vision_shapes(vision: VisionSpec) -> dict[str, tuple[int, ...]]:
    """Return canonical name and shape of every tensor of the tower."""
    width, inner = vision.hidden_size, vision.intermediate_size
    joined = width * vision.spatial_merge_size**2
    frames, side = vision.temporal_patch_size, vision.patch_size
    shapes: dict[str, tuple[int, ...]] = {
        "visual.patch_embed.proj.weight": (width, vision.in_channels, frames, side, side),
        "visual.merger.ln_q.weight": (width,),
    }

    def linear(name: str, out: int, rows: int) -> None:
        shapes[f"visual.{name}.weight"] = (out, rows)
        shapes[f"visual.{name}.bias"] = (out,)

    for i in range(vision.depth):
        for norm in ("norm1", "norm2"):
            shapes[f"visual.blocks.{i}.{norm}.weight"] = (width,)
        linear(f"blocks.{i}.attn.qkv", 3 * width, width)
        linear(f"blocks.{i}.attn.proj", width, width)
        linear(f"blocks.{i}.mlp.gate_proj", inner, width)
        linear(f"blocks.{i}.mlp.up_proj", inner, width)
        linear(f"blocks.{i}.mlp.down_proj", width, inner)
    linear("merger.mlp.0", joined, joined)
    linear("merger.mlp.2", vision.out_hidden_size, joined)
    return shapes


def tower_sizes(vision: VisionSpec) -> TowerSizes:
    """Return the memory that the tower takes.

    Per patch. At the start: the pixels, and twice its row. In attention: the residual stream, the
    normed rows, q, k and v, the same packed with one more chunk, and the output. In the MLP: three
    times its inner rows.
    """
    hidden = vision.hidden_size
    embedding = vision.patch_dim + 3 * hidden
    attention = 6 * hidden + 3 * (hidden + 8 * vision.num_heads)
    mlp = 3 * hidden + 3 * vision.intermediate_size
    fullest = max(embedding, attention, mlp)
    return TowerSizes(num_values(vision_shapes(vision)), fullest, vision.spatial_merge_size**2)
