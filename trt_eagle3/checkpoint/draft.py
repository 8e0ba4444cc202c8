"""Read an EAGLE-3 draft into a manifest: find its producer, resolve and check its fields."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trt_eagle3.checkpoint.angelslim import ANGELSLIM
from trt_eagle3.checkpoint.draft_files import open_draft
from trt_eagle3.checkpoint.draft_geometry import check_draft_tensors
from trt_eagle3.checkpoint.draft_target import check_target, used_tensors
from trt_eagle3.checkpoint.draft_vocabulary import resolve_vocabulary
from trt_eagle3.checkpoint.generic import GENERIC
from trt_eagle3.checkpoint.manifest import Eagle3Manifest
from trt_eagle3.checkpoint.model_config import read_json
from trt_eagle3.checkpoint.modelopt import MODELOPT
from trt_eagle3.checkpoint.other_drafter import refuse_other_drafters
from trt_eagle3.checkpoint.producer import Producer, resolve
from trt_eagle3.checkpoint.resolved_fields import ResolvedFields
from trt_eagle3.checkpoint.safeailab import SAFEAILAB
from trt_eagle3.checkpoint.specforge import SPECFORGE
from trt_eagle3.checkpoint.speculators import SPECULATORS
from trt_eagle3.checkpoint.tensor_index import weight_files
from trt_eagle3.errors import UserError, quote
from trt_eagle3.spec import TargetSpec

__all__ = ["PRODUCERS", "describe_draft", "read_draft"]

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
    check_target(fields)
    if (directory / _ADAPTER).exists():
        fields.warn(f"{_ADAPTER} is not read: draft and target are used without adapters")
    fields.values["tensors"] = used_tensors(fields, resolve_vocabulary(fields, cache))
    manifest = fields.manifest(Eagle3Manifest)
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
