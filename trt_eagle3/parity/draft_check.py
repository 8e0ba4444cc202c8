"""Gates on the draft's committed rows: what it is given, and what it makes of it.

Shapes: n committed rows, k aux layers, H target hidden, Hd draft hidden, Vd draft vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trt_eagle3.parity.board import Board
from trt_eagle3.parity.cycle_check import CycleChecker, CycleState
from trt_eagle3.parity.cycles import Committed, DraftRecord, read_draft_passes
from trt_eagle3.parity.draft import DraftRows
from trt_eagle3.parity.drafting import Acceptance, DraftReference
from trt_eagle3.parity.metrics import row_errors
from trt_eagle3.parity.target_check import CheckedTarget

__all__ = ["check_draft"]


def check_draft(
    board: Board,
    reference: DraftReference,
    targets: Sequence[CheckedTarget],
    acceptance: Acceptance,
    progress: Callable[[], object],
) -> list[DraftRecord]:
    """All draft gates over all answers; the records, for those who look closer."""
    records = []
    for t in targets:
        record = read_draft_passes(t.answer.speculative_passes, t.answer.prompt_len)
        _check_answer(board, reference, t, record, acceptance)
        records.append(record)
        progress()
    if not any(c.verify is not None and len(c.rows) for record in records for c in record.cycles):
        detail = "no answer had a tree drafted and verified: nothing of speculation was checked"
        board.add("draft.proposals", float("inf"), "", "proposals", None, detail)
    _compare_acceptance(board, acceptance)
    return records


def _compare_acceptance(board: Board, acceptance: Acceptance) -> None:
    """Shares by position.

    A type that may differ at all may differ in one cycle, however few there are.
    """
    spare = 1 if board.limit("draft.acceptance").value > 0 else 0
    counts = zip(acceptance.engine, acceptance.reference, acceptance.reached, strict=True)
    for position, (engine, ours, n) in enumerate(counts):
        detail = f"engine {engine / n:.3f}, reference {ours / n:.3f} of {n} cycles"
        value = max(0, abs(engine - ours) - spare) / n
        board.add("draft.acceptance", value, "", f"position {position}", None, detail)


def _check_answer(
    board: Board,
    reference: DraftReference,
    t: CheckedTarget,
    record: DraftRecord,
    acceptance: Acceptance,
) -> None:
    """One answer's draft rows, as far as it is the same plainly."""
    # of a row, the token one ahead must be known too
    until = t.answer.prompt_len + t.answer.agreed - 1
    rows: list[Committed] = []
    while len(rows) < until and len(rows) in record.committed:
        rows.append(record.committed[len(rows)])
    if not rows:
        board.add(
            "draft.aux",
            float("inf"),
            t.answer.name,
            "aux_hidden_states",
            None,
            "the draft was given no row",
        )
        return
    found = _check_rows(board, reference, t, rows)
    first = t.answer.prompt_len - 1
    logits = found.logits.cpu()  # of rows from ``first`` on
    cycles = [c for c in record.cycles if first < c.length <= len(rows)]
    states = [
        CycleState(c, found.features[c.length - 1], logits[c.length - 1 - first]) for c in cycles
    ]
    CycleChecker(board, reference, t, rows).run(states, found.memory, acceptance)


def _check_rows(
    board: Board, reference: DraftReference, t: CheckedTarget, rows: Sequence[Committed]
) -> DraftRows:
    """What the rows were given, and step 0; the reference's own outcome."""
    case, m = t.answer.name, reference.manifest
    aux = torch.stack([r.aux for r in rows])
    for k, part in zip(m.aux_layers, aux.chunk(len(m.aux_layers), dim=-1), strict=True):
        board.add_rows(
            "draft.aux",
            row_errors(part, t.aux[k][: len(rows)]),
            case,
            f"aux_hidden_states[out({k})]",
        )
    embeds = reference.prompt_embeds(t.answer, rows[0].embeds.dtype)[: len(rows)]
    board.add_exact(
        "draft.inputs_embeds", torch.stack([r.embeds for r in rows]), embeds, case, "inputs_embeds"
    )
    places = reference.positions(torch.arange(len(rows)), t.positions)
    board.add_exact(
        "draft.position_ids", torch.stack([r.position for r in rows]), places, case, "position_ids"
    )
    features = reference.draft.fuse(aux.to(reference.target.device))
    board.add_rows(
        "draft.fuse", row_errors(torch.stack([r.fused for r in rows]), features), case, "features"
    )
    mask = torch.ones(len(rows), len(rows), dtype=torch.bool).tril()
    first = min(t.answer.prompt_len - 1, len(rows))
    wanted = torch.arange(first, len(rows))
    found = reference.draft.run(embeds.to(features), features, places.T, mask, logit_rows=wanted)
    errors = row_errors(torch.stack([r.features for r in rows]), found.features)
    board.add_rows("draft.features", errors, case, "features_out.step0")
    pairs: list[tuple[Tensor, Tensor]] = []
    for row, expected in zip(rows[first:], found.logits.cpu(), strict=True):
        if row.logits is not None:
            pairs.append((row.logits, expected))
    if pairs:
        ours, theirs = (torch.stack(side) for side in zip(*pairs, strict=True))
        board.add_rows("draft.logits", row_errors(ours, theirs), case, "logits.step0")
    return found
