"""d2t, the map from draft ids to target ids: offsets, ascending, within the vocabulary; never
absolute ids.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trt_eagle3.checkpoint.manifest import Source
from trt_eagle3.checkpoint.resolved_fields import ResolvedFields
from trt_eagle3.checkpoint.tensor_file import (
    array_content,
    cached_file,
    read_integers,
    write_tensors,
)
from trt_eagle3.checkpoint.tensor_index import TensorRef, open_index

__all__ = ["resolve_vocabulary"]

Ids = NDArray[np.int64]


def resolve_vocabulary(fields: ResolvedFields, cache: Path | None) -> TensorRef | None:
    """Check d2t; its place, or the place of its conversion where the user says that it holds
    absolute ids.

    Args:
        cache: where a converted d2t is kept.
    Raises:
        UserError: it is missing, out of range, unsorted, or absolute without ``draft.overrides.d2t:
            absolute``.
    """
    ref = fields.files.tensors.get("d2t")
    vocab, drafted = fields.values["vocab_size"], fields.values["draft_vocab_size"]
    if ref is None:
        if drafted != vocab:
            raise fields.error(
                f"d2t is missing: {drafted} draft ids cannot be mapped to a vocabulary of {vocab}"
            )
        fields.sources["d2t"] = Source("tensor", "absent: draft ids are target ids")
        return None
    if ref.shape != (drafted,):
        raise fields.error(
            f"d2t: expected {drafted} entries, one per row of lm_head.weight, got shape "
            f"{list(ref.shape)}"
        )
    stored = read_integers(ref)
    meaning = fields.overrides.get("d2t") or _meaning(fields, stored, vocab)
    if meaning == "offset":
        _check_ids(fields, stored, stored + np.arange(drafted), vocab)
        fields.sources["d2t"] = Source(
            "override" if "d2t" in fields.overrides else "tensor", "offsets: id = i + d2t[i]"
        )
        return ref
    if "d2t" not in fields.overrides:
        raise fields.error(
            "d2t holds absolute target ids, expected offsets (target id - draft id). To convert "
            "it: draft.overrides.d2t: absolute"
        )
    _check_ids(fields, stored, stored, vocab)
    fields.sources["d2t"] = Source("override", "absolute ids, converted to offsets")
    file = cached_file([ref.file], "d2t.safetensors", cache)
    write_tensors(file, {"d2t": array_content(stored - np.arange(drafted))})
    return open_index(file.parent)["d2t"]


def _meaning(fields: ResolvedFields, stored: Ids, vocab: int) -> str:
    """``offset`` or ``absolute``: t2d knows; without it, whichever reading is possible, offsets
    first.
    """
    ids = stored + np.arange(len(stored))
    t2d = fields.files.tensors.get("t2d")
    kept = np.flatnonzero(read_integers(t2d)) if t2d is not None else None
    if kept is not None:
        if np.array_equal(kept, ids):
            return "offset"
        if np.array_equal(kept, stored):
            return "absolute"
    if kept is not None and stored.any():
        fields.warn(
            f"t2d marks {len(kept)} ids that are not those of d2t; no server reads it, d2t is taken"
        )
    possible = _sound(ids, vocab), _sound(stored, vocab)
    if possible == (True, True) and len(stored) > 1:
        fields.warn(
            "d2t is read as offsets, but could be absolute ids: it ascends strictly. probe can tell"
        )
    if not stored.any() and len(stored) < vocab:
        fields.warn(
            "d2t is all zeros: draft ids are the first ids of the vocabulary, or it was never "
            "filled in"
        )
    return "absolute" if possible == (False, True) else "offset"


def _sound(ids: Ids, vocab: int) -> bool:
    return bool((np.diff(ids) > 0).all() and (ids >= 0).all() and (ids < vocab).all())


def _check_ids(fields: ResolvedFields, stored: Ids, ids: Ids, vocab: int) -> None:
    outside = (ids < 0) | (ids >= vocab)
    fix = "Use the d2t it was trained with; it holds offsets (target id - draft id)."
    if outside.any():
        bad = int(np.argmax(outside))
        raise fields.error(
            f"d2t[{bad}] = {stored[bad]}: draft id {bad} would be target id {ids[bad]}, out of "
            f"range 0 to {vocab - 1}. {fix}"
        )
    unsorted: Any = np.diff(ids) <= 0
    if unsorted.any():
        bad = int(np.argmax(unsorted)) + 1
        raise fields.error(
            f"d2t[{bad}] = {stored[bad]}: target ids must ascend, got {ids[bad]} after "
            f"{ids[bad - 1]}. {fix}"
        )
