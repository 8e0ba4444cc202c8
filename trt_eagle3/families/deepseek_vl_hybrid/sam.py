"""DeepSeek-VL's SAM tower: its settings, the shapes of its tensors, and its memory.

Shapes: G patches along a side of the larger square, W width of the tower, C channels of its neck.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from trt_eagle3.families.deepseek_vl.tower import peak_values, siglip_of, siglip_shapes
from trt_eagle3.families.family import TowerSizes, num_values
from trt_eagle3.multimodal.squares import num_pieces
from trt_eagle3.spec import VisionSpec

__all__ = ["Sam", "hybrid_shapes", "hybrid_sizes", "sam_of"]

_PREFIX = "sam_"
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Sam:
    """The settings of the tower.

    Attributes:
        image: pixels along a side of the larger square. patch: of a patch.
        width, depth, heads, inner: of the blocks.
        channels: of the neck.
        window: patches along a side of a window.
        global_blocks: blocks that attend over the whole square.
        kept: block whose output is projected too.
        epsilon: of the norms of the blocks.
        qkv_bias: whether q, k and v have biases.
        positions, relative: whether there is a table of positions, and whether attention has
            relative ones.
    """

    image: int
    patch: int
    width: int
    depth: int
    heads: int
    inner: int
    channels: int
    window: int
    global_blocks: tuple[int, ...]
    kept: int
    act: str
    epsilon: float
    qkv_bias: bool
    positions: bool
    relative: bool

    @property
    def side(self) -> int:
        """Patches along a side."""
        return self.image // self.patch

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.width // self.heads

    def window_of(self, block: int) -> int:
        """Return the side of a block's windows; 0: it attends over the whole square."""
        return 0 if block in self.global_blocks else self.window

    def to_own(self) -> Mapping[str, Any]:
        """Convert to entries of ``VisionSpec.own``."""
        return {f"{_PREFIX}{key}": value for key, value in asdict(self).items()}


def sam_of(vision: VisionSpec) -> Sam:
    """Read the values of ``Sam.to_own``."""
    own: Any = {field.name: vision.own[f"{_PREFIX}{field.name}"] for field in fields(Sam)}
    return Sam(**own)


def hybrid_shapes(vision: VisionSpec) -> Shapes:
    """Return canonical name and shape of every tensor of both towers and the aligner."""
    sam, out = sam_of(vision), vision.out_hidden_size
    shapes: Shapes = {
        **siglip_shapes(vision),
        "visual.sam.patch_embed.projection.weight": (sam.width, 3, sam.patch, sam.patch),
        "visual.sam.patch_embed.projection.bias": (sam.width,),
        **_neck("visual.sam.neck", sam),
        **_neck("visual.sam_neck", sam),
        "visual.sam_proj.conv1.weight": (2 * sam.channels, sam.channels, 3, 3),
        "visual.sam_proj.conv2.weight": (4 * sam.channels, 2 * sam.channels, 3, 3),
        "visual.sam_alpha": (1,),
        **_linear("visual.aligner.vision_proj", out // 2, vision.hidden_size),
        **_linear("visual.aligner.high_res_vision_proj", out // 2, 4 * sam.channels),
        **_linear("visual.aligner.proj", out, out),
    }
    if sam.positions:
        shapes["visual.sam.pos_embed"] = (1, sam.side, sam.side, sam.width)
    for i in range(sam.depth):
        shapes |= _block(f"visual.sam.layers.{i}", sam, sam.window_of(i) or sam.side)
    return shapes


def hybrid_sizes(vision: VisionSpec) -> TowerSizes:
    """Return the memory that both towers take.

    SAM's peak for an image is the rows of a block, with q, k and v three times over, or the scores
    of attention before and after the softmax beside them: those of a head over the whole square, or
    of all heads in windows.
    """
    sam, tokens = sam_of(vision), siglip_of(vision).num_patches
    rows = sam.side**2
    windows = -(-sam.side // sam.window)
    padded = max(rows, (windows * sam.window) ** 2)
    scores = 2 * max(rows**2, padded * sam.window**2 * sam.heads)
    inner = padded * (14 * sam.width + 4 * sam.heads * sam.side + 2 * sam.inner)
    features = 8 * (4 * siglip_of(vision).side) ** 2 * sam.channels
    peak = max(scores + inner, features + 4 * rows * sam.channels)
    values = peak_values(vision) + vision.patch_dim + -(-peak // tokens)
    return TowerSizes(num_values(hybrid_shapes(vision)), values, tokens)


def patch_channels(siglip_image: int, sam_image: int) -> int:
    """Return the channels of a patch: a smaller one's, and its share of the larger square."""
    return 3 * (1 + num_pieces(siglip_image, sam_image))


def _block(name: str, sam: Sam, side: int) -> Shapes:
    """Return the tensors of a block that attends over squares of ``side`` patches."""
    shapes = {
        **_norm(f"{name}.layer_norm1", sam.width),
        **_norm(f"{name}.layer_norm2", sam.width),
        f"{name}.attn.qkv.weight": (3 * sam.width, sam.width),
        **_linear(f"{name}.attn.proj", sam.width, sam.width),
        **_linear(f"{name}.mlp.lin1", sam.inner, sam.width),
        **_linear(f"{name}.mlp.lin2", sam.width, sam.inner),
    }
    if sam.qkv_bias:
        shapes[f"{name}.attn.qkv.bias"] = (3 * sam.width,)
    if sam.relative:
        shapes |= {f"{name}.attn.rel_pos_{axis}": (2 * side - 1, sam.head_dim) for axis in "hw"}
    return shapes


def _neck(name: str, sam: Sam) -> Shapes:
    return {
        f"{name}.conv1.weight": (sam.channels, sam.width, 1, 1),
        **_norm(f"{name}.layer_norm1", sam.channels),
        f"{name}.conv2.weight": (sam.channels, sam.channels, 3, 3),
        **_norm(f"{name}.layer_norm2", sam.channels),
    }


def _linear(name: str, out: int, inner: int) -> Shapes:
    return {f"{name}.weight": (out, inner), f"{name}.bias": (out,)}


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
