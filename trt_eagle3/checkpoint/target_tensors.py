"""The tensors of a Qwen3-VL checkpoint: what they are called, their shapes by geometry, and the
check of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trt_eagle3.checkpoint.target import TextSpec, VisionSpec
from trt_eagle3.checkpoint.tensor_index import FLOAT_DTYPES, TensorRef
from trt_eagle3.errors import UserError, clip

__all__ = ["canonical_tensors", "check_tensors", "target_shapes"]


# Checkpoint prefix -> canonical prefix, the first that fits: transformers 4.57 and 5.x, then what
# older tools wrote.
_PREFIXES = (
    ("model.language_model.", ""),
    ("model.visual.", "visual."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", ""),
    ("visual.", "visual."),
    ("lm_head.", "lm_head."),
    ("model.", ""),
)


def target_shapes(
    text: TextSpec, vision: VisionSpec, tied_head: bool
) -> dict[str, tuple[int, ...]]:
    """Canonical name and shape of every tensor of a checkpoint of this geometry."""
    hidden, q, kv = (
        text.hidden_size,
        text.num_heads * text.head_dim,
        text.num_kv_heads * text.head_dim,
    )
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (text.vocab_size, hidden),
        "norm.weight": (hidden,),
    }
    if not tied_head:
        shapes["lm_head.weight"] = (text.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "self_attn.q_norm.weight": (text.head_dim,),
        "self_attn.k_norm.weight": (text.head_dim,),
        "mlp.gate_proj.weight": (text.intermediate_size, hidden),
        "mlp.up_proj.weight": (text.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, text.intermediate_size),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if text.attention_bias:
        layer |= {
            f"self_attn.{p}_proj.bias": (n,)
            for p, n in (("q", q), ("k", kv), ("v", kv), ("o", hidden))
        }
    for i in range(text.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes | _vision_shapes(vision)


def _vision_shapes(vision: VisionSpec) -> dict[str, tuple[int, ...]]:
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
    for i in range(len(vision.deepstack_layers)):
        merger(f"deepstack_merger_list.{i}", wide)
    return shapes


def canonical_tensors(tensors: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
    """``tensors`` under the canonical names of ``TargetSpec``."""
    named: dict[str, TensorRef] = {}
    for name, ref in tensors.items():
        old, new = next(((o, n) for o, n in _PREFIXES if name.startswith(o)), ("", ""))
        canonical = new + name.removeprefix(old)
        if canonical in named:
            raise UserError(
                f"{ref.file.name}: {clip(name)} and {clip(named[canonical].name)} are the same "
                "weight under two names"
            )
        named[canonical] = ref
    return named


def check_tensors(
    tensors: Mapping[str, TensorRef],
    shapes: Mapping[str, tuple[int, ...]],
    directory: Path,
    optional: frozenset[str] = frozenset(),
) -> None:
    """Refuse tensors that are missing, surplus (but for ``optional``), misshapen, or not of a
    float type.
    """
    missing = [name for name in shapes if name not in tensors]
    if missing:
        raise UserError(
            f"{directory}: {_some(missing)} missing; its config promises them. Use the whole "
            "checkpoint."
        )
    surplus = [name for name in tensors if name not in shapes and name not in optional]
    if surplus:
        raise UserError(
            f"{directory}: {_some(surplus)} surplus (in {tensors[surplus[0]].file.name}); its "
            "config has no place for them. Correct config.json, or use the checkpoint's own files "
            "alone."
        )
    for name, shape in shapes.items():
        ref = tensors[name]
        if ref.shape != shape:
            raise UserError(
                f"{directory}: {clip(name)}: expected shape {list(shape)} by config.json, "
                f"got {list(ref.shape)} in {ref.file.name}"
            )
        if ref.dtype not in FLOAT_DTYPES:
            raise UserError(
                f"{directory}: {clip(name)}: expected float32, float16 or bfloat16, got "
                f"{ref.dtype}. Use the unquantised checkpoint."
            )


def _some(names: list[str], shown: int = 3) -> str:
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{', '.join(clip(name, 80) for name in names[:shown])}{rest}"
