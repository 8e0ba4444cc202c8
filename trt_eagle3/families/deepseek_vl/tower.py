"""DeepSeek-VL's SigLIP tower: its own settings, the shapes of its tensors, and its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trt_eagle3.families.family import TowerSizes, num_values
from trt_eagle3.spec import VisionSpec

__all__ = ["Siglip", "peak_values", "siglip_of", "siglip_shapes", "tower_shapes", "tower_sizes"]

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Siglip:
    """The settings of the tower that ``VisionSpec`` has no field for.

    Attributes:
        side: patches along a side of an image, which is one visual token each.
        epsilon: of the norms.
    """

    side: int
    epsilon: float

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return self.side**2

    def to_own(self) -> Mapping[str, int | float]:
        """Convert to entries of ``VisionSpec.own``."""
        return {"side": self.side, "epsilon": self.epsilon}


def siglip_of(vision: VisionSpec) -> Siglip:
    """Read the values of ``Siglip.to_own``."""
    side, epsilon = vision.own["side"], vision.own["epsilon"]
    assert isinstance(side, int), side
    assert isinstance(epsilon, float), epsilon
    return Siglip(side, epsilon)


def siglip_shapes(vision: VisionSpec) -> Shapes:
    """Return canonical name and shape of every tensor of the SigLIP tower."""
    width, inner, side = vision.hidden_size, vision.intermediate_size, vision.patch_size
    shapes: Shapes = {
        "visual.embeddings.patch_embedding.weight": (width, 3, side, side),
        "visual.embeddings.patch_embedding.bias": (width,),
        "visual.embeddings.position_embedding.weight": (siglip_of(vision).num_patches, width),
        **_with_bias("visual.post_layernorm", width),
    }
    for i in range(vision.depth):
        layer = f"visual.encoder.layers.{i}"
        for norm in ("layer_norm1", "layer_norm2"):
            shapes |= _with_bias(f"{layer}.{norm}", width)
        for p in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _with_bias(f"{layer}.self_attn.{p}", width, width)
        shapes |= _with_bias(f"{layer}.mlp.fc1", inner, width)
        shapes |= _with_bias(f"{layer}.mlp.fc2", width, inner)
    return shapes


def tower_shapes(vision: VisionSpec) -> Shapes:
    """Return canonical name and shape of every tensor of the tower and its aligner."""
    out = vision.out_hidden_size
    return {
        **siglip_shapes(vision),
        **_with_bias("visual.aligner.linear1", out, vision.hidden_size),
        **_with_bias("visual.aligner.linear2", out, out),
    }


def peak_values(vision: VisionSpec) -> int:
    """Return the numbers held at once per patch.

    In attention: the residual stream, the normed rows, q, k and v, the same packed with one more
    chunk, and the output. In the MLP: its inner rows.
    """
    hidden = vision.hidden_size
    attention = 6 * hidden + 3 * (hidden + 8 * vision.num_heads)
    return max(vision.patch_dim + 2 * hidden, attention, 3 * hidden + 2 * vision.intermediate_size)


def tower_sizes(vision: VisionSpec) -> TowerSizes:
    """Return the memory that the tower takes."""
    peak = max(peak_values(vision), 3 * vision.out_hidden_size)
    return TowerSizes(num_values(tower_shapes(vision)), peak, siglip_of(vision).num_patches)


def _with_bias(name: str, out: int, *rest: int) -> Shapes:
    return {f"{name}.weight": (out, *rest), f"{name}.bias": (out,)}
