"""Reading an EAGLE-3 draft into a manifest, checked against its tensors and against its target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trt_eagle3.checkpoint import specforge
from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.checkpoint.target import TargetSpec
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.errors import UserError

__all__ = ["read_draft"]


def read_draft(directory: Path, target: TargetSpec, overrides: Mapping[str, Any] | None = None) -> DraftManifest:
    """Resolve the draft in ``directory`` for ``target``.

    Raises:
        UserError: not a draft that can be read, or a draft of another target.
    """
    manifest = specforge.read(directory, target, overrides or {})
    _check_target(manifest, target)
    _check_vocabulary(manifest, target)
    return manifest


def _check_target(manifest: DraftManifest, target: TargetSpec) -> None:
    text, where = target.text, manifest.path
    if manifest.target_hidden_size != text.hidden_size:
        raise UserError(
            f"{where}: a draft for a target of hidden size {manifest.target_hidden_size} (fc.weight), "
            f"this target has {text.hidden_size}. Use the draft that was trained for it."
        )
    if manifest.embedding == "target" and manifest.hidden_size != text.hidden_size:
        raise UserError(
            f"{where}: hidden size {manifest.hidden_size} with the target's embedding of {text.hidden_size}: "
            "embed_tokens.weight is missing"
        )
    if manifest.vocab_size != text.vocab_size:
        raise UserError(
            f"{where}: a draft for a vocabulary of {manifest.vocab_size}, this target has {text.vocab_size}. "
            "Use the draft that was trained for it."
        )
    outside = [k for k in manifest.aux_layers if not 0 <= k < text.num_layers]
    if outside:
        raise UserError(
            f"{where}: aux layer {outside[0]} is out of range: this target has layers 0 to {text.num_layers - 1}. "
            "Use the draft that was trained for it, or set draft.overrides.aux_layers."
        )


def _check_vocabulary(manifest: DraftManifest, target: TargetSpec) -> None:
    """d2t holds offsets: target id = i + d2t[i], strictly ascending, below the target's vocabulary."""
    if "d2t" not in manifest.tensors:
        if manifest.draft_vocab_size != target.text.vocab_size:
            raise UserError(
                f"{manifest.path}: d2t is missing: a draft vocabulary of {manifest.draft_vocab_size} cannot be mapped "
                f"to the target's {target.text.vocab_size}"
            )
        return
    offsets = _int64(manifest.tensors["d2t"])
    ids = np.arange(len(offsets)) + offsets
    if len(ids) and (ids.min() < 0 or ids.max() >= target.text.vocab_size):
        bad = int(np.argmax((ids < 0) | (ids >= target.text.vocab_size)))
        raise UserError(
            f"{manifest.path}: d2t[{bad}] = {offsets[bad]}: draft id {bad} would be target id {ids[bad]}, out of range "
            f"0 to {target.text.vocab_size - 1}. d2t must hold offsets (target id - draft id)."
        )
    if len(ids) > 1 and not (np.diff(ids) > 0).all():
        bad = int(np.argmax(np.diff(ids) <= 0)) + 1
        raise UserError(
            f"{manifest.path}: d2t[{bad}] = {offsets[bad]}: target ids i + d2t[i] must ascend, got {ids[bad]} after "
            f"{ids[bad - 1]}. d2t must hold offsets (target id - draft id)."
        )


def _int64(ref: TensorRef) -> np.ndarray[Any, np.dtype[np.int64]]:
    with ref.file.open("rb") as stream:
        stream.seek(ref.offset)
        return np.frombuffer(stream.read(ref.num_bytes), dtype="<i8").astype(np.int64)
