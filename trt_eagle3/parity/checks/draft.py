"""Checks of the draft: its inputs, its outputs, its proposals and their acceptance."""

from __future__ import annotations

from trt_eagle3.parity.checks.check_recorder import Measurements
from trt_eagle3.parity.checks.evidence import Evidence
from trt_eagle3.parity.checks.own_rounding import own_aux, own_draft

__all__ = [
    "check_acceptance",
    "check_aux",
    "check_features",
    "check_fuse",
    "check_inputs_embeds",
    "check_logits",
    "check_position_ids",
    "check_proposals",
]


def check_aux(e: Evidence, m: Measurements) -> None:
    """Compare the aux rows that the draft received."""
    for draft in e.drafts:
        if not draft.aux:
            detail = "the draft received no row"
            m.add(float("inf"), draft.case, "aux_hidden_states", None, detail, compared=0)
        m.add_rows(*draft.aux, own=own_aux(e))


def check_inputs_embeds(e: Evidence, m: Measurements) -> None:
    """Compare the token embeddings that the draft received, one token ahead."""
    for draft in e.drafts:
        m.add_exact(*draft.inputs_embeds)


def check_position_ids(e: Evidence, m: Measurements) -> None:
    """Compare the positions of its committed rows and of its own steps."""
    for draft in e.drafts:
        m.add_exact(*draft.position_ids)


def check_fuse(e: Evidence, m: Measurements) -> None:
    """Compare the features of the aux hidden states."""
    for draft in e.drafts:
        m.add_rows(*draft.fused)


def check_features(e: Evidence, m: Measurements) -> None:
    """Compare the features that the draft feeds back over four steps, or the rows of blocks."""
    own = own_draft(e)
    for draft in e.drafts:
        m.add_rows(*draft.features, own=own)


def check_logits(e: Evidence, m: Measurements) -> None:
    """Compare the draft's logits of the same rows, before any sequential head."""
    own = own_draft(e)
    for draft in e.drafts:
        m.add_rows(*draft.logits, own=own)


def check_proposals(e: Evidence, m: Measurements) -> None:
    """Check that every drafted token and node is among the best tokens of its parent.

    The engine's own logits decide, and the heads of a block draft. Fails if no tree was verified.
    """
    for draft in e.drafts:
        for p in draft.proposals:
            m.count(nodes=p.count)
            detail = f"{p.wrong[0]}: {p.rule}" if p.wrong else ""
            row = p.row if p.wrong else None
            m.add(len(p.wrong), draft.case, "proposals", row, detail, compared=p.count)
    if not any(draft.verified for draft in e.drafts):
        detail = "no tree was drafted and verified: speculation was not checked"
        m.add(float("inf"), "", "proposals", None, detail, compared=0)


def check_acceptance(e: Evidence, m: Measurements) -> None:
    """Compare acceptance by position.

    A dtype with a tolerance above 0 may differ in one cycle, however few cycles there are.
    """
    counts = e.acceptance.recorded
    spare = 1 if m.limit.value > 0 else 0
    found = zip(counts.engine, counts.reference, counts.reached, strict=True)
    for position, (engine, reference, n) in enumerate(found):
        detail = f"engine {engine / n:.3f}, reference {reference / n:.3f} of {n} cycles"
        value = max(0, abs(engine - reference) - spare) / n
        m.add(value, "", f"position {position}", None, detail, compared=n)
