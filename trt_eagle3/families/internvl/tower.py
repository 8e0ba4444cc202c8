"""InternViT: its own settings, and the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trt_eagle3.families.family import TowerSizes, num_values
from trt_eagle3.spec import VisionSpec

__all__ = ["Tiles", "tiles_of", "tower_sizes", "vision_shapes"]


@dataclass(frozen=True)
class Tiles:
    """The settings of the tower that only InternViT has.

    Attributes:
        side: patches along a side of a tile.
        rms: whether norms are RMSNorms.
        epsilon: epsilon of the norms.
        qkv_bias: whether q, k and v have biases.
        qk_norm: whether q and k are normed over all heads.
        last_norm: whether there is a norm after the last block.
        projector_act: activation between the projector's two products.
    """

    side: int
    rms: bool
    epsilon: float
    qkv_bias: bool
    qk_norm: bool
    last_norm: bool
    projector_act: str

    @property
    def num_patches(self) -> int:
        """Patches of a tile."""
        return self.side**2

    def to_own(self) -> Mapping[str, Any]:
        """Convert to ``VisionSpec.own``."""
        return asdict(self)


def tiles_of(vision: VisionSpec) -> Tiles:
    """Read the values of ``Tiles.to_own``."""
    own: Any = vision.own
    return Tiles(**own)


def vision_shapes(vision: VisionSpec) -> dict[str, tuple[int, ...]]:
    """Return canonical name and shape of every tensor of the tower and its projector."""
    own, width, inner = tiles_of(vision), vision.hidden_size, vision.intermediate_size
    joined, side = width * vision.spatial_merge_size**2, vision.patch_size
    shapes: dict[str, tuple[int, ...]] = {
        "visual.embeddings.cls_token": (1, 1, width),
        "visual.embeddings.position_embeddings": (1, own.num_patches + 1, width),
    }

    def linear(name: str, out: int, *rows: int, bias: bool = True) -> None:
        shapes[f"visual.{name}.weight"] = (out, *rows)
        if bias:
            shapes[f"visual.{name}.bias"] = (out,)

    linear("embeddings.patch_embeddings.projection", width, vision.in_channels, side, side)
    for i in range(vision.depth):
        layer = f"encoder.layer.{i}"
        for norm in ("layernorm_before", "layernorm_after"):
            linear(f"{layer}.{norm}", width, bias=not own.rms)
        for p in "qkv":
            linear(f"{layer}.attention.{p}_proj", width, width, bias=own.qkv_bias)
        for p in "qk" if own.qk_norm else "":
            linear(f"{layer}.attention.{p}_norm", width, bias=False)
        linear(f"{layer}.attention.projection_layer", width, width)
        linear(f"{layer}.mlp.fc1", inner, width)
        linear(f"{layer}.mlp.fc2", width, inner)
        shapes |= {f"visual.{layer}.lambda_{n}": (width,) for n in (1, 2)}
    if own.last_norm:
        linear("layernorm", width)
    linear("projector.layer_norm", joined)
    linear("projector.linear_1", vision.out_hidden_size, joined)
    linear("projector.linear_2", vision.out_hidden_size, vision.out_hidden_size)
    return shapes


def tower_sizes(vision: VisionSpec) -> TowerSizes:
    """Return the memory that the tower takes.

    Per patch. At the start: the pixels, and four times its row. In attention: the residual stream,
    the normed rows, q, k and v, the same packed with one more chunk, and the output. In the MLP:
    its inner rows.
    """
    hidden = vision.hidden_size
    embedding = vision.patch_dim + 4 * hidden
    attention = 6 * hidden + 3 * (hidden + 8 * vision.num_heads)
    if tiles_of(vision).qk_norm:
        attention += 3 * hidden
    mlp = 3 * hidden + 2 * vision.intermediate_size
    fullest = max(embedding, attention, mlp)
    return TowerSizes(num_values(vision_shapes(vision)), fullest, tiles_of(vision).num_patches)
