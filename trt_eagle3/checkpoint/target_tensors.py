"""The tensors of a target: canonical names, shapes by geometry, and the check of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from trt_eagle3.checkpoint.experts import ExpertsRef
from trt_eagle3.checkpoint.quantised.weight import QuantisedRef
from trt_eagle3.checkpoint.tensor_index import FLOAT_DTYPES, TensorRef
from trt_eagle3.errors import UserError, clip
from trt_eagle3.spec import AttentionSpec, DenseMlp, GatedDeltaSpec, LayerSpec, SparseMoe

__all__ = ["UNREAD", "Prefixes", "canonical_tensors", "check_tensors", "decoder_shapes"]

Shapes = Mapping[str, tuple[int, ...]]
UNREAD = "unread."
"""Canonical prefix of tensors that are not read."""
Prefixes = Sequence[tuple[str, str]]
"""Checkpoint prefix -> canonical prefix. The first match counts."""
_BUFFERS = re.compile(r"(.*\.)?rotary(_pos)?_emb\.\w+")  # computed from the config, never trained


def decoder_shapes(
    layers: Sequence[LayerSpec], hidden: int, vocab: int, tied_head: bool
) -> dict[str, tuple[int, ...]]:
    """Return canonical name and shape of every tensor of a decoder and its head."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocab, hidden),
        "norm.weight": (hidden,),
    }
    if not tied_head:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i, layer in enumerate(layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer_shapes(layer, hidden)}
    return shapes


def _layer_shapes(layer: LayerSpec, hidden: int) -> list[tuple[str, tuple[int, ...]]]:
    return [
        *_mixer_shapes(layer.mixer, hidden),
        *((f"mlp.{name}", shape) for name, shape in _mlp_shapes(layer.mlp, hidden)),
        ("input_layernorm.weight", (hidden,)),
        ("post_attention_layernorm.weight", (hidden,)),
    ]


def _mlp_shapes(mlp: DenseMlp | SparseMoe, hidden: int) -> list[tuple[str, tuple[int, ...]]]:
    if isinstance(mlp, DenseMlp):
        return _dense_shapes("", mlp.intermediate_size, hidden)
    experts, inner = mlp.num_experts, mlp.expert_width
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("gate.weight", (experts, hidden)),
        ("experts.gate_up_proj", (experts, 2 * inner, hidden)),
        ("experts.down_proj", (experts, hidden, inner)),
    ]
    if mlp.shared_expert_width:
        shapes += _dense_shapes("shared_expert.", mlp.shared_expert_width, hidden)
        shapes.append(("shared_expert_gate.weight", (1, hidden)))
    return shapes


def _dense_shapes(prefix: str, inner: int, hidden: int) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (f"{prefix}gate_proj.weight", (inner, hidden)),
        (f"{prefix}up_proj.weight", (inner, hidden)),
        (f"{prefix}down_proj.weight", (hidden, inner)),
    ]


def _mixer_shapes(
    spec: AttentionSpec | GatedDeltaSpec, hidden: int
) -> list[tuple[str, tuple[int, ...]]]:
    if isinstance(spec, GatedDeltaSpec):
        return _delta_shapes(spec, hidden)
    return _attention_shapes(spec, hidden)


def _delta_shapes(spec: GatedDeltaSpec, hidden: int) -> list[tuple[str, tuple[int, ...]]]:
    heads = spec.num_v_heads
    rows = {"qkv": spec.channels, "z": spec.v_width, "b": heads, "a": heads}
    shapes: list[tuple[str, tuple[int, ...]]] = [
        (f"in_proj_{p}.weight", (width, hidden)) for p, width in rows.items()
    ]
    shapes += [
        ("conv1d.weight", (spec.channels, 1, spec.conv_width)),
        ("A_log", (heads,)),
        ("dt_bias", (heads,)),
        ("norm.weight", (spec.value_dim,)),
        ("out_proj.weight", (hidden, spec.v_width)),
    ]
    return [(f"linear_attn.{name}", shape) for name, shape in shapes]


def _attention_shapes(spec: AttentionSpec, hidden: int) -> list[tuple[str, tuple[int, ...]]]:
    q, kv = spec.q_width, spec.kv_width
    widths = {"q": spec.q_proj_width, "k": kv, "v": kv}
    shapes: list[tuple[str, tuple[int, ...]]] = [
        *((f"self_attn.{p}_proj.weight", (width, hidden)) for p, width in widths.items()),
        ("self_attn.o_proj.weight", (hidden, q)),
    ]
    if spec.qk_norm:
        shapes += [(f"self_attn.{p}_norm.weight", (spec.head_dim,)) for p in "qk"]
    if spec.qkv_bias:
        shapes += [(f"self_attn.{p}_proj.bias", (width,)) for p, width in widths.items()]
    if spec.out_bias:
        shapes.append(("self_attn.o_proj.bias", (hidden,)))
    return shapes


def canonical_tensors(tensors: Mapping[str, TensorRef], prefixes: Prefixes) -> dict[str, TensorRef]:
    """Rename ``tensors`` to the canonical names of ``TargetCheckpoint``.

    ``UNREAD`` parts and rope buffers (``inv_freq``), which older tools saved, are omitted.
    """
    named: dict[str, TensorRef] = {}
    for name, ref in tensors.items():
        old, new = next(((o, n) for o, n in prefixes if name.startswith(o)), ("", ""))
        if new.startswith(UNREAD) or _BUFFERS.fullmatch(name):
            continue
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
    shapes: Shapes,
    directory: Path,
    optional: frozenset[str] = frozenset(),
) -> None:
    """Check that the tensors are complete, have the right shapes, and a float or weight format.

    Tensors that are not in ``shapes`` must be in ``optional``.
    """
    missing = [name for name in shapes if name not in tensors]
    if missing:
        raise UserError(
            f"{directory}: {_some(missing)} missing, required by its config. Use the whole "
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
        quantised = isinstance(ref, QuantisedRef | ExpertsRef)  # experts are already checked
        if ref.dtype not in FLOAT_DTYPES and not quantised:
            raise UserError(
                f"{directory}: {clip(name)}: expected float32, float16 or bfloat16, got "
                f"{ref.dtype}, and no config states its quantisation. Use the whole checkpoint."
            )


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(clip(name, 80) for name in names[:3])}{rest}"
