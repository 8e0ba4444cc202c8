"""Read a block draft into a manifest: find its producer, resolve and check its fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trt_eagle3.checkpoint.draft_files import open_draft
from trt_eagle3.checkpoint.draft_geometry import (
    agree_with_config,
    check_activation,
    check_dimensions,
    count_heads,
    count_layers,
    read_epsilon,
    read_longest,
    resolve_tables,
    resolve_vocabularies,
)
from trt_eagle3.checkpoint.draft_keys import is_structural
from trt_eagle3.checkpoint.draft_target import check_target, used_tensors
from trt_eagle3.checkpoint.draft_vocabulary import resolve_vocabulary
from trt_eagle3.checkpoint.manifest import SourceKind
from trt_eagle3.checkpoint.other_drafter import refuse_unsupported
from trt_eagle3.checkpoint.producer import (
    geometry_section,
    resolve_rope,
    resolve_target_width,
)
from trt_eagle3.checkpoint.resolved_fields import MAX_BLOCK, ResolvedFields
from trt_eagle3.checkpoint.target_tensors import check_tensors
from trt_eagle3.drafts.block.attention import resolve_attention
from trt_eagle3.drafts.block.heads import places, resolve_heads, resolve_method
from trt_eagle3.drafts.block.manifest import BlockManifest
from trt_eagle3.drafts.block.names import SECTIONS, canonical, named_method
from trt_eagle3.drafts.block.producer import PRODUCERS, BlockProducer
from trt_eagle3.drafts.block.shapes import block_shapes
from trt_eagle3.errors import clip, quote
from trt_eagle3.spec import TargetSpec

__all__ = ["read_block"]

_REQUIRED = (
    *("fc.weight", "hidden_norm.weight", "norm.weight"),
    *("layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight"),
    *("layers.0.self_attn.q_norm.weight", "layers.0.mlp.gate_proj.weight"),
)
_SINKS = (".self_attn.attention_sink_bias", ".self_attn.sinks")
_SIZE = "block_size"
_KNOWN = frozenset(
    {
        # keys that are read
        *("aux_hidden_state_layer_ids", "target_layer_ids", "block_size", "mask_token_id"),
        *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
        *("sliding_window_non_causal", "is_causal", "causal", "use_swa", "swa_window_size"),
        *("sample_from_anchor", "shift_label", "projector_type", "num_target_layers"),
        *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
        *("markov_rank", "markov_head_type", "enable_confidence_head", "use_confidence_head"),
        *("confidence_head_with_markov", "input_embedding_scale", "output_multiplier"),
        *("final_logit_softcapping", "attention_sink_bias", "attention_bias", "rms_norm_eps"),
        *("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"),
        *("num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
        *("dflash_config", "dspark_config", "transformer_layer_config"),
        # keys of training and of transformers' configs without an effect here
        *("attention_dropout", "attention_mode", "attention_backend", "attn_implementation"),
        *("_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal"),
        *("confidence_head_alpha", "loss_decay_gamma", "num_anchors", "training_block_size"),
        *("chunk_size_feed_forward", "output_attentions", "add_cross_attention"),
        *("attention_probs_dropout_prob", "draft_attn_impl"),
    }
)
_FACTORS = {
    "embedding_scale": ("input_embedding_scale", 1.0),
    "logit_multiplier": ("output_multiplier", 1.0),
    "logit_softcap": ("final_logit_softcapping", 0.0),
}
"""Field -> config key, and the value without it."""


def read_block(
    directory: Path,
    target: TargetSpec | None,
    overrides: Mapping[str, Any] | None = None,
    cache: Path | None = None,
) -> BlockManifest:
    """Resolve the draft in ``directory``.

    Args:
        target: the target to serve. Without one, no field is checked against it or derived from it.
        overrides: manifest field -> value, in place of every value in the files.
        cache: folder for tensors that must be converted (``pytorch_model.bin``, absolute d2t).
    Raises:
        UserError: this is not a block draft, is inconsistent, or is a draft of another target.
    """
    files = open_draft(directory, cache)
    refuse_unsupported(files)
    named, place = named_method(files)
    fields = ResolvedFields(canonical(files), target, overrides or {}, BlockManifest)
    producer = _producer(fields)
    _refuse_unknown_keys(fields)
    _geometry(fields)
    resolve_method(fields, named, place)
    _aux_layers(producer, fields)
    _block(fields, place if named == "dspark" else "")
    _mask(fields)
    resolve_attention(fields, producer)
    resolve_heads(fields)
    _factors(fields)
    resolve_rope(fields, producer.name, producer.read_rope, whole_heads=True)
    rule = f"{producer.name}'s training code"
    fields.put("aux_pre_deepstack", producer.aux_pre_deepstack, "convention", rule)
    _check_overrides(fields)
    check_target(fields)
    fields.values["tensors"] = used_tensors(fields, resolve_vocabulary(fields, cache))
    manifest = fields.manifest(BlockManifest)
    check_tensors(manifest.tensors, block_shapes(manifest), manifest.path, frozenset({"d2t"}))
    return manifest


def _check_overrides(fields: ResolvedFields) -> None:
    """Check the numbers inside of overrides; those of files are checked as they are read."""
    if any(layer.window < 0 for layer in fields.values["layers"]):
        raise fields.error("draft.overrides.layers: window: expected a whole number from 0")
    head = fields.values["confidence"]
    if head is not None and not all(0 < t < math.inf for t in head.temperatures):
        raise fields.error("draft.overrides.confidence: temperatures: expected positive numbers")
    if head is not None and head.temperatures:
        count = fields.values[_SIZE] - (0 if fields.values["anchor_row"] else 1)
        if len(head.temperatures) != count:
            raise fields.error(
                f"draft.overrides.confidence: temperatures: expected {count}, one per draft, got "
                f"{len(head.temperatures)}"
            )
    if head is not None and head.with_markov and fields.values["markov"] is None:
        raise fields.error(
            "draft.overrides.confidence: with_markov: there is no markov head. Set it to false."
        )


def _producer(fields: ResolvedFields) -> BlockProducer:
    """Return the producer and put its name."""
    files, name = fields.files, fields.values.get("producer")
    if name is not None:
        if found := next((p for p in PRODUCERS if p.name == name), None):
            return found
        known = ", ".join(p.name for p in PRODUCERS)
        raise fields.error(f"draft.overrides.producer: expected one of {known}, got {quote(name)}")
    found = next(p for p in PRODUCERS if p.evidence(files))
    fields.put("producer", found.name, "config", found.evidence(files))
    return found


def _refuse_unknown_keys(fields: ResolvedFields) -> None:
    """Check that no key may change the computation that is not read."""
    for section in (*SECTIONS, "transformer_layer_config"):
        config = fields.files.find(section, "object") if section else fields.files.config
        for key, value in (config or {}).items():
            if key not in _KNOWN and is_structural(key, value):
                place = f"{section}.{key}" if section else key
                raise fields.error(
                    f"a block draft of an unknown layout ({quote(place)[1:-1]} "
                    f"{quote(value, 80)}): not supported."
                )


def _geometry(fields: ResolvedFields) -> None:
    """Put all sizes, most of them from the tensors."""
    tensors, section = fields.files.tensors, geometry_section(fields)
    missing = [name for name in _REQUIRED if name not in tensors]
    if missing:
        raise fields.error(f"not a block draft: {', '.join(missing)} missing")
    check_dimensions(fields)
    agree_with_config(fields, section, "hidden_size", tensors["fc.weight"])
    count_layers(fields, section)
    key = f"{section}.num_hidden_layers" if section else "num_hidden_layers"
    told = fields.files.find(key, "whole")
    if told not in {None, fields.values["num_layers"]}:
        raise fields.error(
            f"{key}: {told} in config.json, {fields.values['num_layers']} in the tensors. Use the "
            "whole checkpoint."
        )
    gate = tensors["layers.0.mlp.gate_proj.weight"]
    agree_with_config(fields, section, "intermediate_size", gate)
    count_heads(fields, section)
    read_epsilon(fields, section)
    check_activation(fields, section)
    read_longest(fields, section)
    _attention_bias(fields, section)
    _refuse_sinks(fields)
    there = "mask_embedding" in tensors
    fields.put(
        "mask_embedding",
        "own" if there else "token",
        "tensor",
        f"mask_embedding is {'there' if there else 'absent: the row of mask_token_id'}",
    )
    resolve_tables(fields)
    resolve_vocabularies(fields, section)


def _attention_bias(fields: ResolvedFields, section: str) -> None:
    """Put ``attention_bias`` after checking that the config does not contradict the tensors."""
    field, name = "attention_bias", "layers.0.self_attn.q_proj.bias"
    there = name in fields.files.tensors
    place = f"{section}.{field}" if section else field
    told = fields.files.find(place, "flag")
    if told not in {None, there}:
        raise fields.error(
            f"{place} is {told} in config.json, {name} is {'there' if there else 'absent'}. "
            "Use the whole checkpoint."
        )
    fields.put(field, there, "tensor", f"{name} is {'there' if there else 'absent'}")


def _refuse_sinks(fields: ResolvedFields) -> None:
    """Check that no layer has attention sinks, by key or by tensor."""
    told = [place for place, on in places(fields, "attention_sink_bias", "flag").items() if on]
    there = [ref.name for name, ref in fields.files.tensors.items() if name.endswith(_SINKS)]
    if told or there:
        raise fields.error(f"{clip((told + there)[0])}: attention sinks: not supported.")


def _num_target_layers(fields: ResolvedFields) -> int | None:
    """Return the number of the target's layers; None if no one names it."""
    key = "num_target_layers"
    told, target = fields.files.find(key, "whole"), fields.target
    if target is None:
        return None if told is None else int(told)
    if told not in {None, target.num_layers}:
        raise fields.error(
            f"{key}: a draft for {told} layers, the target has {target.num_layers}. Use the draft "
            "that was trained for this target."
        )
    return target.num_layers


def _aux_layers(producer: BlockProducer, fields: ResolvedFields) -> None:
    """Put ``aux_layers`` as out(k) ids, and the target's width."""
    n = _num_target_layers(fields)
    found = fields.agree("aux_layers", places(fields, producer.aux_key, "integers"))
    if "aux_layers" not in fields.values and found:
        ids, key = found
        _check_ids(producer, fields, tuple(ids), f"{key} {quote(ids)}", n)
    elif "aux_layers" not in fields.values:
        if n is None:
            raise fields.error(
                f"aux layers: there is no {producer.aux_key}. Name the target, or set "
                "draft.overrides.aux_layers."
            )
        default, rule = _default_layers(producer, n, fields.values["num_layers"])
        if default[0] < 0 or list(default) != sorted(set(default)):
            raise fields.error(
                f"there is no {producer.aux_key}, and {rule}, for n = {n}, gives "
                f"{quote(list(default))}. Set draft.overrides.aux_layers."
            )
        fields.put("aux_layers", default, "convention", f"no {producer.aux_key}: {rule}")
    resolve_target_width(fields)


def _check_ids(
    producer: BlockProducer,
    fields: ResolvedFields,
    ids: tuple[int, ...],
    place: str,
    num_layers: int | None,
) -> None:
    """Put ``aux_layers`` by the ids of a config key."""
    states = producer.aux_ids == "state"
    how = "states after j layers" if states else "outputs of layer i"
    fix = "Set draft.overrides.aux_layers."
    layers = tuple(i - 1 if states else i for i in ids)
    if list(layers) != sorted(set(layers)):
        raise fields.error(f"{place}: expected ascending ids, each once. {fix}")
    if layers and layers[0] < 0:
        raise fields.error(
            f"{place} ({how}): {ids[0]} is the embedding, not a layer's output: not supported."
        )
    if num_layers is not None and layers and layers[-1] >= num_layers:
        raise fields.error(
            f"{place} ({how}): {ids[-1]} is beyond the target's {num_layers} layers. Use the draft "
            "that was trained for this target, or set draft.overrides.aux_layers."
        )
    if producer.final_norm and num_layers is not None and layers and layers[-1] == num_layers - 1:
        raise fields.error(
            f"{place} ({how}): {ids[-1]} is the last layer, whose state {producer.name} takes "
            "after the target's final norm: not supported."
        )
    fields.put("aux_layers", layers, "config", f"{place}, {how}")


def _default_layers(producer: BlockProducer, n: int, num_draft: int) -> tuple[tuple[int, ...], str]:
    """Return the layers that a trainer takes without a key, and its rule."""
    if producer.aux_ids == "state":
        return (1, n // 2 - 1, n - 4), "its default states 2, n/2, n-3 of n layers"
    if num_draft == 1:
        return (n // 2,), "the middle of n layers"
    spread = tuple(round(1 + i * (n - 4) / (num_draft - 1)) for i in range(num_draft))
    return spread, f"{num_draft} of n layers, evenly from 1 to n-3"


def _block(fields: ResolvedFields, dspark: str) -> None:
    """Put ``shift``, ``anchor_row`` and ``block_size``.

    Args:
        dspark: the place where the config names DSpark; empty if it does not.
    """
    keys = ("sample_from_anchor", "shift_label")
    told = {p: on for key in keys for p, on in places(fields, key, "flag").items()}
    found = fields.agree("shift", told)
    kind: SourceKind = "config" if found else "convention"
    if found:
        following, why = found[0], f"{found[1]} {found[0]}"
    elif dspark:
        if fields.values["producer"] == "speculators":
            fields.warn(
                f"{keys[0]} is absent, which speculators always writes; read as true, the default "
                "of its DSpark. vLLM's reader uses false: draft.overrides.shift: own. probe "
                "measures which fits"
            )
        following, why = True, f"{dspark}: rows predict the next token; no {keys[0]}"
    else:
        following, why = False, f"DFlash: rows predict their own token; no {keys[0]}"
    fields.put("shift", "next" if following else "own", kind, why)
    own = fields.values["shift"] == "own"
    fields.put("anchor_row", not own, kind, "row 0 drafts if rows predict the next token")
    if own and fields.values["anchor_row"]:
        raise fields.error(
            "draft.overrides.anchor_row: with shift own, row 0 predicts the anchor, which is "
            "known. Set shift: next, or leave it out."
        )
    _block_size(fields)


def _block_size(fields: ResolvedFields) -> None:
    found = fields.agree(_SIZE, places(fields, _SIZE, "whole"))
    if found:
        fields.put(_SIZE, found[0], "config", found[1])
    if fields.values.get("producer") == "z-lab":
        fields.put(_SIZE, 16, "convention", f"no {_SIZE}: z-lab's code uses 16")
    size, least = fields.values.get(_SIZE), 1 if fields.values["anchor_row"] else 2
    if size is None or not least <= size <= MAX_BLOCK:
        raise fields.error(
            f"{_SIZE}: expected {least} to {MAX_BLOCK} rows, got {size}. Correct config.json, or "
            f"set draft.overrides.{_SIZE}."
        )


def _mask(fields: ResolvedFields) -> None:
    """Put ``mask_token_id``."""
    key = "mask_token_id"
    found = fields.agree(key, places(fields, key, "whole"))
    if found:
        fields.put(key, found[0], "config", found[1])
    fix = f"Correct config.json, or set draft.overrides.{key}."
    mask, vocab = fields.values.get(key), fields.values["vocab_size"]
    if mask is None:
        raise fields.error(f"{key}: not in config.json. {fix}")
    if mask >= vocab:
        raise fields.error(f"{key}: {mask} is outside the vocabulary of {vocab}. {fix}")
    ends = fields.target.eos_token_ids if fields.target else ()
    if mask in ends:
        raise fields.error(f"{key}: {mask} is an end token of the target. {fix}")


def _factors(fields: ResolvedFields) -> None:
    for field, (key, neutral) in _FACTORS.items():
        found = fields.agree(field, places(fields, key, "number"))
        if found:
            fields.put(field, float(found[0]), "config", found[1])
        fields.put(field, neutral, "default", f"{key} is absent")
        value = fields.values[field]
        if not 0 <= value < math.inf or (neutral and not value):
            raise fields.error(f"{key}: expected a positive number, got {value:g}")
