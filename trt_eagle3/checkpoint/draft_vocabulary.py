"""d2t: the map from draft ids to target ids, stored as offsets, never as absolute ids.

Target ids must be distinct and within the vocabulary. SpecForge and speculators write them in
ascending order, ModelOpt in order of frequency.
"""

from __future__ import annotations

from pathlib import Path

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
    """Check d2t and return its place; None if draft ids are target ids.

    With ``draft.overrides.d2t: absolute``, return the place of its conversion to offsets.

    Args:
        cache: folder for a converted d2t.
    Raises:
        UserError: d2t is missing, out of range, repeats an id, is absolute without
            ``draft.overrides.d2t: absolute``, or moves ids although the head is not the draft's.
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
        _check_head(fields, moved=bool(stored.any()))
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
    _check_head(fields, moved=not np.array_equal(stored, np.arange(drafted)))
    fields.sources["d2t"] = Source("override", "absolute ids, converted to offsets")
    file = cached_file([ref.file], "d2t.safetensors", cache)
    write_tensors(file, {"d2t": array_content(stored - np.arange(drafted))})
    return open_index(file.parent)["d2t"]


def _meaning(fields: ResolvedFields, stored: Ids, vocab: int) -> str:
    """Return ``offset`` or ``absolute``, by t2d; without it, by range, offsets first."""
    ids = stored + np.arange(len(stored))
    t2d = fields.files.tensors.get("t2d")
    kept = np.flatnonzero(read_integers(t2d)) if t2d is not None else None
    if kept is not None:
        if np.array_equal(kept, np.sort(ids)):
            return "offset"
        if np.array_equal(kept, np.sort(stored)):
            return "absolute"
    if kept is not None and stored.any():
        fields.warn(
            f"t2d marks {len(kept)} ids that are not those of d2t; no server reads it, d2t is used"
        )
    possible = _sound(ids, vocab), _sound(stored, vocab)
    if possible == (True, True) and len(stored) > 1:
        fields.warn(
            "d2t is read as offsets, but could be absolute ids: both are distinct and in range. "
            "probe measures which fits"
        )
    if not stored.any() and len(stored) < vocab:
        fields.warn(
            "d2t is all zeros: draft ids are the first ids of the vocabulary, or it was never "
            "filled in"
        )
    return "absolute" if possible == (False, True) else "offset"


def _sound(ids: Ids, vocab: int) -> bool:
    return bool(len(np.unique(ids)) == len(ids) and (ids >= 0).all() and (ids < vocab).all())


def _check_ids(fields: ResolvedFields, stored: Ids, ids: Ids, vocab: int) -> None:
    outside = (ids < 0) | (ids >= vocab)
    fix = "Use the d2t it was trained with; it holds offsets (target id - draft id)."
    if outside.any():
        bad = int(np.argmax(outside))
        raise fields.error(
            f"d2t[{bad}] = {stored[bad]}: draft id {bad} would be target id {ids[bad]}, out of "
            f"range 0 to {vocab - 1}. {fix}"
        )
    _, firsts, counts = np.unique(ids, return_index=True, return_counts=True)
    if (counts > 1).any():
        first = int(firsts[counts > 1].min())
        again = first + 1 + int(np.argmax(ids[first + 1 :] == ids[first]))
        raise fields.error(
            f"d2t[{again}] = {stored[again]}: draft ids {first} and {again} are both target id "
            f"{ids[first]}: target ids must be distinct. {fix}"
        )


def _check_head(fields: ResolvedFields, *, moved: bool) -> None:
    """Check that the map does not move ids if the head's rows are target ids.

    They are if the head is the target's, or the embedding serves as the head.
    """
    own = fields.values["head"] == "own" and "lm_head.weight" in fields.files.tensors
    if moved and not own and fields.values["draft_vocab_size"] == fields.values["vocab_size"]:
        raise fields.error(
            "d2t: draft ids are not target ids, and the draft has no lm_head.weight whose rows "
            "would be draft ids. Use the whole checkpoint."
        )
