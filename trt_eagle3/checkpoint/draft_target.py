"""Check that a draft belongs to its target, and keep the tensors that both need."""

from __future__ import annotations

import re

from trt_eagle3.checkpoint.manifest import Source
from trt_eagle3.checkpoint.resolved_fields import ResolvedFields
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.errors import quote

__all__ = ["check_target", "same_generation", "used_tensors"]

_VARIANT = re.compile(r"(_(moe|text|thinker|chat))+$")
"""Suffixes of a family's name for mixtures, language models and parts."""


def same_generation(family: str, other: str) -> bool:
    """Return whether two families are of one generation, by their names."""
    return _VARIANT.sub("", family) == _VARIANT.sub("", other)


def used_tensors(fields: ResolvedFields, d2t: TensorRef | None) -> dict[str, TensorRef]:
    """Return the tensors that the manifest uses. The head may be the draft's own embedding."""
    tensors = {
        name: ref for name, ref in fields.files.tensors.items() if name not in {"t2d", "d2t"}
    }
    for field, name in (("embedding", "embed_tokens.weight"), ("head", "lm_head.weight")):
        if fields.values[field] == "target":
            tensors.pop(name, None)
    if (
        fields.files.find("tie_word_embeddings", "flag")
        and fields.values["head"] == "target"
        and fields.sources["head"].kind != "override"
        and "embed_tokens.weight" in fields.files.tensors
    ):
        tensors["lm_head.weight"] = fields.files.tensors["embed_tokens.weight"]
        fields.values["head"] = "own"
        fields.sources["head"] = Source("config", "tie_word_embeddings: its own embedding")
    drafted, vocab = fields.values["draft_vocab_size"], fields.values["vocab_size"]
    if fields.values["head"] == "target" and drafted != vocab:
        if "lm_head.weight" in fields.files.tensors:
            raise fields.error(
                f"draft.overrides.head: target: {drafted} draft ids need a head of their own, the "
                f"target's has {vocab} rows. Leave it out."
            )
        raise fields.error(
            f"lm_head.weight missing: {drafted} draft ids need a head of their own, the target's "
            f"has {vocab} rows. Use the whole checkpoint."
        )
    return tensors if d2t is None else {**tensors, "d2t": d2t}


def _check_named_target(fields: ResolvedFields, family: str) -> None:
    """Check that the config does not name a target of another generation."""
    key = "target_model_type"
    told = fields.files.find(key, "text")
    if told and not same_generation(told, family):
        raise fields.error(
            f"{key}: a draft for {quote(told, 80)}, the target is {family}. Use the draft that was "
            "trained for this target, or correct the key."
        )


def check_target(fields: ResolvedFields) -> None:
    """Check that the draft belongs to the target."""
    if fields.target is None:
        return
    values, target = fields.values, fields.target
    fix = "Use the draft that was trained for this target."
    aux, width, fc = (
        values["aux_layers"],
        values["target_hidden_size"],
        fields.files.tensors["fc.weight"],
    )
    _check_named_target(fields, target.family)
    outside = [k for k in aux if not 0 <= k < target.num_layers]
    if outside:
        raise fields.error(
            f"aux layer {outside[0]} ({fields.sources['aux_layers'].detail}) is out of range: the "
            f"target has layers 0 to {target.num_layers - 1}. {fix[:-1]}, or set "
            "draft.overrides.aux_layers."
        )
    if width != target.hidden_size:
        raise fields.error(
            f"a draft for hidden size {width} ({fc.name} {list(fc.shape)} takes {len(aux)} aux "
            f"states), the target's is {target.hidden_size}. {fix}"
        )
    if values["vocab_size"] != target.vocab_size:
        raise fields.error(
            f"a draft for a vocabulary of {values['vocab_size']} "
            f"({fields.sources['vocab_size'].detail}), the target's is {target.vocab_size}. {fix}"
        )
    for field, name in (("embedding", "embed_tokens.weight"), ("head", "lm_head.weight")):
        if values[field] == "target" and values["hidden_size"] != target.hidden_size:
            raise fields.error(
                f"{name} is missing, and the target's has {target.hidden_size} columns where this "
                f"draft's hidden size is {values['hidden_size']}. Use the whole checkpoint."
            )
