"""Resolve a draft's geometry from its tensors, and from the config only where tensors lack it."""

from __future__ import annotations

import re
from typing import Any

from trt_eagle3.checkpoint.config_value import Kind
from trt_eagle3.checkpoint.manifest import Eagle3Manifest
from trt_eagle3.checkpoint.resolved_fields import ResolvedFields
from trt_eagle3.checkpoint.target_tensors import check_tensors
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.errors import clip, quote

__all__ = [
    "agree_with_config",
    "check_activation",
    "check_dimensions",
    "check_draft_tensors",
    "count_heads",
    "count_layers",
    "draft_shapes",
    "read_epsilon",
    "read_longest",
    "resolve_geometry",
    "resolve_tables",
    "resolve_vocabularies",
]

_LAYER = re.compile(r"layers\.([0-9]{1,9})\.")
_MAX_VOCAB = 1 << 24  # ids; the largest vocabularies have 2**18


def resolve_geometry(fields: ResolvedFields, section: str = "") -> None:
    """Put every field that the tensors determine, and the rest of the geometry from the config.

    The config provides head counts, epsilon and vocabulary.

    Args:
        section: config section of the decoder layer's geometry, if it is not the top level.
    Raises:
        UserError: tensors and config contradict each other, or a value is missing.
    """
    tensors = fields.files.tensors
    check_dimensions(fields)
    agree_with_config(fields, section, "hidden_size", tensors["fc.weight"])
    count_layers(fields, section)
    gate = tensors.get("layers.0.mlp.gate_proj.weight")
    if gate is None:
        raise fields.error(
            "layers.0.mlp.gate_proj.weight is missing: not an EAGLE-3 draft of a kind that is known"
        )
    agree_with_config(fields, section, "intermediate_size", gate)
    count_heads(fields, section)
    read_epsilon(fields, section)
    _flags(fields)
    resolve_vocabularies(fields, section)
    check_activation(fields, section)
    read_longest(fields, section)


def check_activation(fields: ResolvedFields, section: str) -> None:
    """Check that the config names no other activation than silu."""
    act = _config(fields, section, "hidden_act", "text")
    if act not in {None, "silu"}:
        raise fields.error(f"hidden_act: expected silu, got {quote(act)}: not supported")


def read_longest(fields: ResolvedFields, section: str) -> None:
    """Put ``max_position_embeddings``."""
    longest = _config(fields, section, "max_position_embeddings")
    key = "max_position_embeddings"
    fields.put(
        key,
        longest or 0,
        "config" if longest else "default",
        key if longest else f"{key} is absent",
    )


def _config(fields: ResolvedFields, section: str, key: str, kind: Kind = "whole") -> Any:
    return fields.files.find(f"{section}.{key}" if section else key, kind)


def check_dimensions(fields: ResolvedFields) -> None:
    """Check that every tensor has a dimension and that fc is a matrix."""
    for name, ref in fields.files.tensors.items():
        if not ref.shape or (name == "fc.weight" and len(ref.shape) != 2):
            words = "a matrix" if name == "fc.weight" else "a dimension or more"
            raise fields.error(
                f"{clip(ref.name)}: expected {words}, got shape {list(ref.shape)}. Use the whole "
                "checkpoint."
            )


def agree_with_config(fields: ResolvedFields, section: str, key: str, ref: TensorRef) -> None:
    """Put a tensor's row count after checking that the config does not contradict it."""
    fields.agree(key, {ref.name: ref.shape[0], f"config.json {key}": _config(fields, section, key)})
    fields.put(key, ref.shape[0], "tensor", f"{ref.name} {list(ref.shape)}")


def count_layers(fields: ResolvedFields, section: str) -> None:
    """Count the layers in the tensors: configs of one-layer drafts hold the target's count."""
    numbers = {int(m[1]) for name in fields.files.tensors if (m := _LAYER.match(name))}
    if numbers != set(range(len(numbers))):
        raise fields.error(
            f"layers {clip(sorted(numbers))}: expected consecutive numbers from 0. Use the whole "
            "checkpoint."
        )
    claimed = _config(fields, section, "num_hidden_layers")
    if claimed not in {None, len(numbers)}:
        fields.warn(
            f"num_hidden_layers is {claimed} in config.json, {len(numbers)} in the tensors; the "
            "tensors are used"
        )
    fields.put("num_layers", len(numbers), "tensor", f"{fields.files.layer_prefix}.*")


def count_heads(fields: ResolvedFields, section: str) -> None:
    """Put ``num_heads``, ``num_kv_heads`` and ``head_dim``."""
    tensors = fields.files.tensors
    rows = {
        p: tensors[f"layers.0.self_attn.{p}_proj.weight"].shape[0]
        for p in "qk"
        if _has_projection(fields, p)
    }
    for field, key in (
        ("num_heads", "num_attention_heads"),
        ("num_kv_heads", "num_key_value_heads"),
    ):
        number = _config(fields, section, key)
        if number is not None:
            if number == 0:
                raise fields.error(f"config.json {key}: expected a positive whole number, got 0")
            fields.put(field, number, "config", key)
    q_norm = tensors.get("layers.0.self_attn.q_norm.weight")
    if q_norm is not None:
        fields.put("head_dim", q_norm.shape[0], "tensor", q_norm.name)
    if "num_heads" not in fields.values:
        raise fields.error(
            "num_attention_heads: not in config.json. Set draft.overrides.num_heads."
        )
    heads = fields.values["num_heads"]
    fields.put("num_kv_heads", heads, "default", "num_key_value_heads is absent: as many as heads")
    kv_heads = fields.values["num_kv_heads"]
    if rows["q"] % heads == 0:
        fields.put(
            "head_dim",
            rows["q"] // heads,
            "tensor",
            "layers.0.self_attn.q_proj.weight / num_attention_heads",
        )
    head_dim = fields.values.get("head_dim", 0)
    claimed = None if "head_dim" in fields.overrides else _config(fields, section, "head_dim")
    if (
        rows["q"] != heads * head_dim
        or rows["k"] != kv_heads * head_dim
        or claimed not in {None, head_dim}
    ):
        raise fields.error(
            f"{heads} heads and {kv_heads} key-value heads of head_dim {claimed or head_dim} "
            f"(config.json) do not give q_proj's {rows['q']} and k_proj's {rows['k']} rows. Set "
            "draft.overrides.num_heads and num_kv_heads."
        )
    if heads % kv_heads:
        raise fields.error(f"{heads} heads over {kv_heads} key-value heads: expected whole groups")


def _has_projection(fields: ResolvedFields, p: str) -> bool:
    name = f"layers.0.self_attn.{p}_proj.weight"
    if name not in fields.files.tensors:
        raise fields.error(f"{name} is missing: not an EAGLE-3 draft of a kind that is known")
    return True


def read_epsilon(fields: ResolvedFields, section: str) -> None:
    """Put ``rms_norm_eps``."""
    epsilon = _config(fields, section, "rms_norm_eps", "number")
    if epsilon is not None:
        if not 0 <= epsilon < 1:
            raise fields.error(
                f"config.json rms_norm_eps: expected a small number, got {quote(epsilon)}"
            )
        fields.put("rms_norm_eps", float(epsilon), "config", "rms_norm_eps")
    fields.put(
        "rms_norm_eps",
        1e-6,
        "default",
        "rms_norm_eps is absent: transformers' Llama and Qwen3 use 1e-6",
    )


def _flags(fields: ResolvedFields) -> None:
    tensors = fields.files.tensors
    for field, name in {
        "norm_before_fc": "input_norm.weight",
        "fc_norm": "fc_norm.0.weight",
        "qk_norm": "layers.0.self_attn.q_norm.weight",
        "attention_bias": "layers.0.self_attn.q_proj.bias",
        "mlp_bias": "layers.0.mlp.gate_proj.bias",
        "fc_bias": "fc.bias",
    }.items():
        fields.put(
            field,
            name in tensors,
            "tensor",
            f"{name} is {'there' if name in tensors else 'absent'}",
        )
    for key, field in {
        "norm_before_fc": "norm_before_fc",
        "fc_norm": "fc_norm",
        "enable_fc_norm": "fc_norm",
    }.items():
        claimed, there = fields.files.find(key, "flag"), fields.values[field]
        if claimed not in {None, there}:
            word = "there" if there else "absent"
            raise fields.error(
                f"{key} is {claimed} in config.json, its tensors are {word}. Use the whole "
                "checkpoint."
            )
    resolve_tables(fields)


def resolve_tables(fields: ResolvedFields) -> None:
    """Put ``embedding`` and ``head``: the draft's own if it has the tensor."""
    for field, name in {"embedding": "embed_tokens.weight", "head": "lm_head.weight"}.items():
        there = name in fields.files.tensors
        fields.put(
            field,
            "own" if there else "target",
            "tensor",
            f"{name} is {'there' if there else 'absent'}",
        )


def resolve_vocabularies(fields: ResolvedFields, section: str) -> None:
    """Put ``vocab_size`` and ``draft_vocab_size``."""
    tensors, target = fields.files.tensors, fields.target
    rows = {
        name: tensors[name].shape[0] for name in ("embed_tokens.weight", "t2d") if name in tensors
    }
    found = fields.agree(
        "vocab_size", {"config.json vocab_size": _config(fields, section, "vocab_size"), **rows}
    )
    if found:
        fields.put("vocab_size", found[0], "config" if "config" in found[1] else "tensor", found[1])
    elif target is not None:
        fields.put("vocab_size", target.vocab_size, "default", "in no file: the target's")
    if "vocab_size" not in fields.values:
        raise fields.error("vocab_size: not in config.json. Set draft.overrides.vocab_size.")
    if not 0 < fields.values["vocab_size"] <= _MAX_VOCAB:
        raise fields.error(
            f"vocab_size: expected 1 to {_MAX_VOCAB}, got {fields.values['vocab_size']}"
        )
    drafted = {
        name: tensors[name].shape[0] for name in ("lm_head.weight", "d2t") if name in tensors
    }
    claimed = fields.files.find("draft_vocab_size", "whole")
    found = fields.agree("draft_vocab_size", {**drafted, "config.json draft_vocab_size": claimed})
    if found:
        fields.put("draft_vocab_size", found[0], "tensor" if drafted else "config", found[1])
    fields.put(
        "draft_vocab_size",
        fields.values["vocab_size"],
        "default",
        "no lm_head, d2t or draft_vocab_size: the whole",
    )


def draft_shapes(manifest: Eagle3Manifest) -> dict[str, tuple[int, ...]]:
    """Return canonical name and shape of every weight of a draft of this geometry, without d2t."""
    m, hidden, aux = manifest, manifest.hidden_size, len(manifest.aux_layers)
    q, kv, inner = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim, m.intermediate_size
    linears = {"fc": ((hidden, aux * m.target_hidden_size), m.fc_bias)}
    norms = {"norm": hidden}
    if m.norm_before_fc:
        norms["input_norm"] = aux * m.target_hidden_size
    if m.fc_norm:
        norms |= {f"fc_norm.{i}": m.target_hidden_size for i in range(aux)}
    for n in range(m.num_layers):
        layer, width = f"layers.{n}", hidden if n else 2 * hidden
        for p, rows in (("q", q), ("k", kv), ("v", kv)):
            linears[f"{layer}.self_attn.{p}_proj"] = ((rows, width), m.attention_bias)
        linears[f"{layer}.self_attn.o_proj"] = ((hidden, q), m.attention_bias)
        for p in ("gate", "up"):
            linears[f"{layer}.mlp.{p}_proj"] = ((inner, hidden), m.mlp_bias)
        linears[f"{layer}.mlp.down_proj"] = ((hidden, inner), m.mlp_bias)
        names = ("input_layernorm", "post_attention_layernorm") + (() if n else ("hidden_norm",))
        norms |= {f"{layer}.{name}": hidden for name in names}
        if m.qk_norm:
            norms |= {f"{layer}.self_attn.{p}_norm": m.head_dim for p in "qk"}
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.weight": shape for name, (shape, _) in linears.items()
    }
    shapes |= {f"{name}.bias": shape[:1] for name, (shape, biased) in linears.items() if biased}
    shapes |= {f"{name}.weight": (width,) for name, width in norms.items()}
    if m.embedding == "own":
        shapes["embed_tokens.weight"] = (m.vocab_size, hidden)
    if m.head == "own":
        shapes["lm_head.weight"] = (m.draft_vocab_size, hidden)
    if m.parallel is not None:
        shapes["mask_hidden"] = (1, 1, aux * m.target_hidden_size)
    return shapes


def check_draft_tensors(manifest: Eagle3Manifest) -> None:
    """Check that the tensors are exactly those of the manifest's geometry."""
    check_tensors(manifest.tensors, draft_shapes(manifest), manifest.path, frozenset({"d2t"}))
