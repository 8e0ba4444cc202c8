"""The tensors of a Qwen3-VL checkpoint: name prefixes, and the shapes of its tower's tensors."""

from __future__ import annotations

from trt_eagle3.families.family import TowerSizes, num_values
from trt_eagle3.spec import VisionSpec

__all__ = ["PREFIXES", "tower_sizes", "vision_shapes"]

# transformers 4.57 and 5.x, then older tools
PREFIXES = (
    ("model.language_model.", ""),
    ("model.visual.", "visual."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", ""),
    ("visual.", "visual."),
    ("lm_head.", "lm_head."),
    ("model.", ""),
)


def vision_shapes(vision: VisionSpec) -> dict[str, tuple[int, ...]]:
    """Return canonical name and shape of every tensor of the tower."""
    width, inner = vision.hidden_size, vision.intermediate_size
    wide = width * vision.spatial_merge_size**2
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    shapes: dict[str, tuple[int, ...]] = {
        "visual.pos_embed.weight": (vision.num_position_embeddings, width)
    }

    def linear(name: str, out: int, *rest: int) -> None:
        shapes[f"visual.{name}.weight"] = (out, *rest)
        shapes[f"visual.{name}.bias"] = (out,)

    def merger(name: str, norm: int) -> None:
        linear(f"{name}.norm", norm)
        linear(f"{name}.linear_fc1", wide, wide)
        linear(f"{name}.linear_fc2", vision.out_hidden_size, wide)

    linear("patch_embed.proj", width, *patch)
    for i in range(vision.depth):
        linear(f"blocks.{i}.norm1", width)
        linear(f"blocks.{i}.norm2", width)
        linear(f"blocks.{i}.attn.qkv", 3 * width, width)
        linear(f"blocks.{i}.attn.proj", width, width)
        linear(f"blocks.{i}.mlp.linear_fc1", inner, width)
        linear(f"blocks.{i}.mlp.linear_fc2", width, inner)
    merger("merger", width)
    for i in range(len(vision.level_blocks)):
        merger(f"deepstack_merger_list.{i}", wide)
    return shapes


def tower_sizes(vision: VisionSpec) -> TowerSizes:
    """Return the memory that the tower takes.

    Per patch. At the start: the pixels, and four corners of the position table, twice. In
    attention: the residual stream, the normed rows, q, k and v, the same packed with one more
    chunk, and the output. In the MLP: its inner rows.
    """
    hidden = vision.hidden_size
    embedding = vision.patch_dim + 9 * hidden
    attention = 6 * hidden + 3 * (hidden + 8 * vision.num_heads)
    mlp = 3 * hidden + 2 * vision.intermediate_size
    fullest = max(embedding, attention, mlp)
    return TowerSizes(num_values(vision_shapes(vision)), fullest, vision.spatial_merge_size**2)
