"""A draft's geometry, counted from its tensors; the config only says what tensors cannot."""

from __future__ import annotations

import re
from typing import Any

from trt_eagle3.checkpoint.config_value import Kind
from trt_eagle3.checkpoint.draft_facts import Facts
from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.checkpoint.target_tensors import check_tensors
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.errors import clip, quote

__all__ = ["check_draft_tensors", "draft_shapes", "resolve_geometry"]

_LAYER = re.compile(r"layers\.([0-9]{1,9})\.")
_MAX_VOCAB = 1 << 24  # ids; the largest vocabularies have 2**18


def resolve_geometry(facts: Facts, section: str = "") -> None:
    """Put every field that tensors decide, and the head counts, epsilon and vocabulary of the config.

    Args:
        section: where the config keeps the decoder layer's geometry, where that is not the top.
    Raises:
        UserError: tensors and config contradict each other, or something is missing.
    """
    tensors = facts.files.tensors
    _check_dimensions(facts)
    _agree_with_config(facts, section, "hidden_size", tensors["fc.weight"])
    _count_layers(facts, section)
    gate = tensors.get("layers.0.mlp.gate_proj.weight")
    if gate is None:
        raise facts.error("layers.0.mlp.gate_proj.weight is missing: not an EAGLE-3 draft of a kind that is known")
    _agree_with_config(facts, section, "intermediate_size", gate)
    _count_heads(facts, section)
    _read_epsilon(facts, section)
    _flags(facts)
    _vocabularies(facts, section)
    act = _config(facts, section, "hidden_act", "text")
    if act not in {None, "silu"}:
        raise facts.error(f"hidden_act: expected silu, got {quote(act)}: not supported")
    longest = _config(facts, section, "max_position_embeddings")
    said = "max_position_embeddings"
    facts.put(said, longest or 0, "config" if longest else "default", said if longest else f"{said} is absent")


def _config(facts: Facts, section: str, key: str, kind: Kind = "whole") -> Any:
    return facts.files.find(f"{section}.{key}" if section else key, kind)


def _check_dimensions(facts: Facts) -> None:
    """Rows can be counted: nothing is a lone number, and fc is a matrix."""
    for name, ref in facts.files.tensors.items():
        if not ref.shape or (name == "fc.weight" and len(ref.shape) != 2):
            words = "a matrix" if name == "fc.weight" else "a dimension or more"
            raise facts.error(
                f"{clip(ref.name)}: expected {words}, got shape {list(ref.shape)}. Use the whole checkpoint."
            )


def _agree_with_config(facts: Facts, section: str, key: str, ref: TensorRef) -> None:
    """The rows of a tensor, which the config may repeat but not contradict."""
    facts.agree(key, {ref.name: ref.shape[0], f"config.json {key}": _config(facts, section, key)})
    facts.put(key, ref.shape[0], "tensor", f"{ref.name} {list(ref.shape)}")


def _count_layers(facts: Facts, section: str) -> None:
    """The tensors are right: configs of one-layer drafts carry their target's layer count."""
    numbers = {int(m[1]) for name in facts.files.tensors if (m := _LAYER.match(name))}
    if numbers != set(range(len(numbers))):
        raise facts.error(
            f"layers {clip(sorted(numbers))}: expected consecutive numbers from 0. Use the whole checkpoint."
        )
    claimed = _config(facts, section, "num_hidden_layers")
    if claimed not in {None, len(numbers)}:
        facts.warn(
            f"num_hidden_layers is {claimed} in config.json, {len(numbers)} in the tensors; the tensors are right"
        )
    facts.put("num_layers", len(numbers), "tensor", f"{facts.files.layer_prefix}.*")


def _count_heads(facts: Facts, section: str) -> None:
    tensors = facts.files.tensors
    rows = {p: tensors[f"layers.0.self_attn.{p}_proj.weight"].shape[0] for p in "qk" if _has_projection(facts, p)}
    for field, key in (("num_heads", "num_attention_heads"), ("num_kv_heads", "num_key_value_heads")):
        number = _config(facts, section, key)
        if number is not None:
            if number == 0:
                raise facts.error(f"config.json {key}: expected a positive whole number, got 0")
            facts.put(field, number, "config", key)
    q_norm = tensors.get("layers.0.self_attn.q_norm.weight")
    if q_norm is not None:
        facts.put("head_dim", q_norm.shape[0], "tensor", q_norm.name)
    if "num_heads" not in facts.values:
        raise facts.error("num_attention_heads: not in config.json. Set draft.overrides.num_heads.")
    heads = facts.values["num_heads"]
    facts.put("num_kv_heads", heads, "default", "num_key_value_heads is absent: as many as heads")
    kv_heads = facts.values["num_kv_heads"]
    if rows["q"] % heads == 0:
        facts.put("head_dim", rows["q"] // heads, "tensor", "layers.0.self_attn.q_proj.weight / num_attention_heads")
    head_dim = facts.values.get("head_dim", 0)
    claimed = None if "head_dim" in facts.overrides else _config(facts, section, "head_dim")
    if rows["q"] != heads * head_dim or rows["k"] != kv_heads * head_dim or claimed not in {None, head_dim}:
        raise facts.error(
            f"{heads} heads and {kv_heads} key-value heads of head_dim {claimed or head_dim} (config.json) do not give "
            f"q_proj's {rows['q']} and k_proj's {rows['k']} rows. Set draft.overrides.num_heads and num_kv_heads."
        )
    if heads % kv_heads:
        raise facts.error(f"{heads} heads over {kv_heads} key-value heads: expected whole groups")


def _has_projection(facts: Facts, p: str) -> bool:
    name = f"layers.0.self_attn.{p}_proj.weight"
    if name not in facts.files.tensors:
        raise facts.error(f"{name} is missing: not an EAGLE-3 draft of a kind that is known")
    return True


def _read_epsilon(facts: Facts, section: str) -> None:
    epsilon = _config(facts, section, "rms_norm_eps", "number")
    if epsilon is not None:
        if not 0 <= epsilon < 1:
            raise facts.error(f"config.json rms_norm_eps: expected a small number, got {quote(epsilon)}")
        facts.put("rms_norm_eps", float(epsilon), "config", "rms_norm_eps")
    facts.put("rms_norm_eps", 1e-6, "default", "rms_norm_eps is absent: transformers' Llama takes 1e-6")


def _flags(facts: Facts) -> None:
    tensors = facts.files.tensors
    for field, name in {
        "norm_before_fc": "input_norm.weight",
        "fc_norm": "fc_norm.0.weight",
        "qk_norm": "layers.0.self_attn.q_norm.weight",
        "attention_bias": "layers.0.self_attn.q_proj.bias",
        "mlp_bias": "layers.0.mlp.gate_proj.bias",
        "fc_bias": "fc.bias",
    }.items():
        facts.put(field, name in tensors, "tensor", f"{name} is {'there' if name in tensors else 'absent'}")
    for key, field in {"norm_before_fc": "norm_before_fc", "fc_norm": "fc_norm", "enable_fc_norm": "fc_norm"}.items():
        claimed, there = facts.files.find(key, "flag"), facts.values[field]
        if claimed not in {None, there}:
            word = "there" if there else "absent"
            raise facts.error(f"{key} is {claimed} in config.json, its tensors are {word}. Use the whole checkpoint.")
    for field, name in {"embedding": "embed_tokens.weight", "head": "lm_head.weight"}.items():
        there = name in tensors
        facts.put(field, "own" if there else "target", "tensor", f"{name} is {'there' if there else 'absent'}")


def _vocabularies(facts: Facts, section: str) -> None:
    tensors, target = facts.files.tensors, facts.target
    rows = {name: tensors[name].shape[0] for name in ("embed_tokens.weight", "t2d") if name in tensors}
    found = facts.agree("vocab_size", {"config.json vocab_size": _config(facts, section, "vocab_size"), **rows})
    if found:
        facts.put("vocab_size", found[0], "config" if "config" in found[1] else "tensor", found[1])
    elif target is not None:
        facts.put("vocab_size", target.text.vocab_size, "default", "no file says it: the target's")
    if "vocab_size" not in facts.values:
        raise facts.error("vocab_size: not in config.json. Set draft.overrides.vocab_size.")
    if not 0 < facts.values["vocab_size"] <= _MAX_VOCAB:
        raise facts.error(f"vocab_size: expected 1 to {_MAX_VOCAB}, got {facts.values['vocab_size']}")
    drafted = {name: tensors[name].shape[0] for name in ("lm_head.weight", "d2t") if name in tensors}
    claimed = facts.files.find("draft_vocab_size", "whole")
    found = facts.agree("draft_vocab_size", {**drafted, "config.json draft_vocab_size": claimed})
    if found:
        facts.put("draft_vocab_size", found[0], "tensor" if drafted else "config", found[1])
    facts.put(
        "draft_vocab_size", facts.values["vocab_size"], "default", "no lm_head, d2t or draft_vocab_size: the whole"
    )


def draft_shapes(manifest: DraftManifest) -> dict[str, tuple[int, ...]]:
    """Canonical name and shape of every weight of a draft of this geometry; d2t is not among them."""
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
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, (shape, _) in linears.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, (shape, biased) in linears.items() if biased}
    shapes |= {f"{name}.weight": (width,) for name, width in norms.items()}
    if m.embedding == "own":
        shapes["embed_tokens.weight"] = (m.vocab_size, hidden)
    if m.head == "own":
        shapes["lm_head.weight"] = (m.draft_vocab_size, hidden)
    return shapes


def check_draft_tensors(manifest: DraftManifest) -> None:
    """Refuse tensors that the manifest does not account for, or that it accounts for and are not there."""
    check_tensors(manifest.tensors, draft_shapes(manifest), manifest.path, frozenset({"d2t"}))
