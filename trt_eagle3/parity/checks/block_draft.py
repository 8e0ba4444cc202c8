"""Checks of a block draft alone: its context rows, and what its heads choose."""

from __future__ import annotations

from trt_eagle3.drafts.block.manifest import BlockManifest
from trt_eagle3.parity.checks.check_recorder import Measurements
from trt_eagle3.parity.checks.evidence import Evidence
from trt_eagle3.parity.checks.own_rounding import own_draft

__all__ = [
    "check_confidence",
    "check_context",
    "check_scores",
    "check_tokens",
    "lacks_block",
    "lacks_confidence",
    "lacks_fuse",
    "lacks_heads",
]


def check_context(e: Evidence, m: Measurements) -> None:
    """Compare keys and values of context rows, as the caches hold them after an answer."""
    own = own_draft(e)
    for draft in e.drafts:
        m.add_rows(*draft.context, own=own)


def check_scores(e: Evidence, m: Measurements) -> None:
    """Compare the scores of tokens after selector or markov head, after the same tokens."""
    own = own_draft(e)
    for draft in e.drafts:
        m.add_rows(*draft.scores, own=own)


def check_tokens(e: Evidence, m: Measurements) -> None:
    """Compare drafted tokens with the reference's choice after the same tokens.

    Another token is a tie if the reference's score is that near to its best score.
    """
    for draft in e.drafts:
        other = [t for t in draft.tokens if t.got != t.expected]
        failed = [t for t in other if not t.margin <= m.tie_margin * t.size]
        m.count(tokens_compared=len(draft.tokens), ties=len(other) - len(failed))
        row = failed[0].row if failed else None
        detail = f"expected {failed[0].expected}, got {failed[0].got}" if failed else ""
        m.add(len(failed), draft.case, "tokens", row, detail, compared=len(draft.tokens))


def check_confidence(e: Evidence, m: Measurements) -> None:
    """Compare the estimated probability of acceptance of each draft, after the same tokens."""
    own = own_draft(e)
    for draft in e.drafts:
        m.add_rows(*draft.confidence, own=own)


def lacks_fuse(e: Evidence) -> str:
    """Return why the draft feeds back no features; empty if it does."""
    return "" if _block(e) is None else "a block draft has no features that are fed back"


def lacks_block(e: Evidence) -> str:
    """Return why the draft has no block; empty if it has one."""
    return "the draft is no block draft" if _block(e) is None else ""


def lacks_heads(e: Evidence) -> str:
    """Return why the draft has no sequential head; empty if it has one."""
    block = _block(e)
    if block is None:
        return lacks_block(e)
    return "" if block.has_sequential_head else "the draft has no selector and no markov head"


def lacks_confidence(e: Evidence) -> str:
    """Return why the draft has no confidence head; empty if it has one."""
    block = _block(e)
    if block is None:
        return lacks_block(e)
    return "" if block.confidence is not None else "the draft has no confidence head"


def _block(e: Evidence) -> BlockManifest | None:
    return e.manifest if isinstance(e.manifest, BlockManifest) else None
