"""Read the mask rows of a P-EAGLE draft: an EAGLE-3 draft with ``mask_hidden``.

Facts from speculators 0.9.0 (models/peagle), SpecForge 0.2 (modeling/draft/peagle.py) and the keys
of vLLM 0.33's reader. SpecForge's exporter writes neither the mask token nor the number of drafts.
"""

from __future__ import annotations

from trt_eagle3.checkpoint.manifest import ParallelRows
from trt_eagle3.checkpoint.resolved_fields import MAX_BLOCK, ResolvedFields
from trt_eagle3.errors import quote

__all__ = ["PARALLEL_KEYS", "resolve_parallel"]

_MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
_PROPOSALS = "speculators_config.proposal_methods"
PARALLEL_KEYS = frozenset({*_MASK_KEYS, "parallel_drafting", "num_depths"})
"""Keys that an EAGLE-3 draft without ``mask_hidden`` does not have."""

_FIX = "Set draft.overrides.parallel: {mask_token_id: ..., num_drafts: ...}."


def resolve_parallel(fields: ResolvedFields) -> None:
    """Put ``parallel``.

    Raises:
        UserError: the mask token or the number of drafts is missing or invalid, or the config names
            P-EAGLE, but the tensor is missing.
    """
    if "mask_hidden" not in fields.files.tensors:
        names = (fields.files.architecture, fields.files.find("speculators_model_type", "text"))
        if any(name and "peagle" in name.lower() for name in names):
            raise fields.error(
                f"mask_hidden is missing, but config.json names P-EAGLE ({quote(names[0])}). Use "
                "the whole checkpoint."
            )
        fields.put("parallel", None, "tensor", "mask_hidden is absent")
        if fields.values["parallel"] is not None:
            raise fields.error(
                "draft.overrides.parallel: mask_hidden is missing: not a P-EAGLE draft. Leave it "
                "out."
            )
        return
    if fields.values.get("parallel") is None:
        mask = fields.agree(
            "parallel", {key: fields.files.find(key, "whole") for key in _MASK_KEYS}
        )
        count = _num_drafts(fields)
        if mask is None or count is None:
            what = "mask_token_id" if mask is None else f"{_PROPOSALS}.speculative_tokens"
            raise fields.error(f"P-EAGLE: {what}: not in config.json. {_FIX}")
        rows = ParallelRows(mask_token_id=mask[0], num_drafts=count)
        fields.values.pop("parallel", None)
        fields.put("parallel", rows, "config", f"{mask[1]} and {_PROPOSALS}")
    _check(fields, fields.values["parallel"])


def _num_drafts(fields: ResolvedFields) -> int | None:
    """Return the tokens of the first proposal method; None without one."""
    methods = fields.files.find(_PROPOSALS, "any")
    first = methods[0] if isinstance(methods, list) and methods else None
    count = first.get("speculative_tokens") if isinstance(first, dict) else None
    if count is None:
        return None
    if not isinstance(count, int) or isinstance(count, bool):
        raise fields.error(
            f"{_PROPOSALS}: speculative_tokens: expected a whole number, got {quote(count)}"
        )
    return count


def _check(fields: ResolvedFields, rows: ParallelRows) -> None:
    if not 0 < rows.num_drafts <= MAX_BLOCK:
        raise fields.error(
            f"P-EAGLE: expected 1 to {MAX_BLOCK} drafts per forward, got {rows.num_drafts}. {_FIX}"
        )
    vocab = fields.values["vocab_size"]
    if not 0 <= rows.mask_token_id < vocab:
        raise fields.error(
            f"mask_token_id: {rows.mask_token_id} is outside the vocabulary of {vocab}. {_FIX}"
        )
