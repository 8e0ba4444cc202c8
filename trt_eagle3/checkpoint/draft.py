"""Read an EAGLE-3 draft into a manifest: find its producer, resolve and check its fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trt_eagle3.checkpoint.angelslim import ANGELSLIM
from trt_eagle3.checkpoint.draft_files import open_draft
from trt_eagle3.checkpoint.draft_geometry import check_draft_tensors
from trt_eagle3.checkpoint.draft_vocabulary import resolve_vocabulary
from trt_eagle3.checkpoint.generic import GENERIC
from trt_eagle3.checkpoint.manifest import Eagle3Manifest, Source
from trt_eagle3.checkpoint.model_config import read_json
from trt_eagle3.checkpoint.modelopt import MODELOPT
from trt_eagle3.checkpoint.other_drafter import refuse_other_drafters
from trt_eagle3.checkpoint.producer import Producer, resolve
from trt_eagle3.checkpoint.resolved_fields import ResolvedFields
from trt_eagle3.checkpoint.safeailab import SAFEAILAB
from trt_eagle3.checkpoint.specforge import SPECFORGE
from trt_eagle3.checkpoint.speculators import SPECULATORS
from trt_eagle3.checkpoint.tensor_index import TensorRef, weight_files
from trt_eagle3.errors import UserError, quote
from trt_eagle3.spec import TargetSpec

__all__ = ["PRODUCERS", "describe_draft", "read_draft"]

_VARIANT = re.compile(r"(_(moe|text|thinker|chat))+$")
"""Suffixes of a family's name for mixtures, language models and parts."""

_ADAPTER = "adapter_model.safetensors"

PRODUCERS = (SPECULATORS, ANGELSLIM, SPECFORGE, MODELOPT, SAFEAILAB, GENERIC)
"""Producers in the order in which they are tested. The last accepts every draft."""


def read_draft(
    directory: Path,
    target: TargetSpec | None,
    overrides: Mapping[str, Any] | None = None,
    cache: Path | None = None,
) -> Eagle3Manifest:
    """Resolve the draft in ``directory``.

    Args:
        target: the target to serve. Without one, no field is checked against it or derived from it.
        overrides: manifest field -> value, in place of every value in the files.
        cache: folder for tensors that must be converted (``pytorch_model.bin``, absolute d2t).
    Raises:
        UserError: this is not an EAGLE-3 draft, is inconsistent, or is a draft of another target.
    """
    files = open_draft(directory, cache)
    refuse_other_drafters(files)
    fields = ResolvedFields(files, target, overrides or {})
    resolve(_producer(fields), fields)
    _check_target(fields)
    if (directory / _ADAPTER).exists():
        fields.warn(f"{_ADAPTER} is not read: draft and target are used without adapters")
    fields.values["tensors"] = _tensors(fields, resolve_vocabulary(fields, cache))
    manifest = fields.manifest()
    check_draft_tensors(manifest)
    return manifest


def describe_draft(directory: Path) -> str:
    """Describe the EAGLE-3 draft in ``directory`` for messages; empty if there is none.

    Tensors in pickles are not read, so nothing is converted.
    """
    try:
        if not weight_files(directory):
            pickled = any(directory.glob("pytorch_model*.bin"))
            named = "draft_vocab_size" in read_json(directory / "config.json")
            return "an EAGLE-3 draft" if pickled and named else ""
        files = open_draft(directory)
        refuse_other_drafters(files)
        producer = next(p for p in PRODUCERS if p.evidence(files))
    except UserError:
        return ""
    return "an EAGLE-3 draft" + ("" if producer is GENERIC else f" ({producer.name} layout)")


def _producer(fields: ResolvedFields) -> Producer:
    name = fields.values.get("producer")
    if name is None:
        return next(p for p in PRODUCERS if p.evidence(fields.files))
    for producer in PRODUCERS:
        if producer.name == name:
            return producer
    known = ", ".join(p.name for p in PRODUCERS)
    raise fields.error(f"draft.overrides.producer: expected one of {known}, got {quote(name)}")


def _tensors(fields: ResolvedFields, d2t: TensorRef | None) -> dict[str, TensorRef]:
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
    if told and _VARIANT.sub("", told) != _VARIANT.sub("", family):
        raise fields.error(
            f"{key}: a draft for {quote(told, 80)}, the target is {family}. Use the draft that was "
            "trained for this target, or correct the key."
        )


def _check_target(fields: ResolvedFields) -> None:
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
