"""Draft rows: compare the draft's inputs and outputs with the reference's.

Logits of all answers would fill the memory, so answers are compared one by one and only errors are
kept. Shapes: n committed rows, k aux layers, H target hidden, Hd draft hidden, Vd draft vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trt_eagle3.parity.metrics import Compared, RowErrors, row_errors
from trt_eagle3.parity.record.answers import RecordedAnswer, served_answers
from trt_eagle3.parity.record.cycles import Committed, DraftRecord, read_draft_forwards
from trt_eagle3.parity.reference.compared_draft import ComparedDraft, logit_errors
from trt_eagle3.parity.reference.draft import DraftRows
from trt_eagle3.parity.reference.draft_cycles import CycleState, DraftCycles
from trt_eagle3.parity.reference.drafting import Acceptance, AutoregressiveReference
from trt_eagle3.parity.reference.expected import ExpectedAnswer

__all__ = ["committed_rows", "compare_drafts", "read_draft"]


def compare_drafts(
    reference: AutoregressiveReference,
    expected: Sequence[ExpectedAnswer],
    progress: Callable[[], object],
) -> tuple[list[ComparedDraft], Acceptance]:
    """Compare every answer's draft rows, and count accepted proposals by position."""
    found, acceptance = [], Acceptance()
    for e, served in zip(expected, served_answers([e.answer for e in expected]), strict=True):
        record = read_draft(reference, e.answer)
        draft = ComparedDraft(e.answer.name, record.verified)
        rows = committed_rows(e, record)
        if rows:
            _compare_answer(reference, e, record, rows, draft, acceptance, served=served)
        found.append(draft)
        progress()
    return found, acceptance


def read_draft(reference: AutoregressiveReference, answer: RecordedAnswer) -> DraftRecord:
    """Read the draft's part of the record of an answer."""
    mask = reference.mask_row
    aux = None if mask is None else mask.aux.cpu()
    return read_draft_forwards(answer.speculative_forwards, answer.prompt_len, aux)


def committed_rows(e: ExpectedAnswer, record: DraftRecord) -> list[Committed]:
    """Return the rows that lie on the answer, as far as it is the same without speculation."""
    # a row needs the next token, so the last agreed token has no row
    until = e.answer.prompt_len + e.answer.agreed - 1
    rows: list[Committed] = []
    while len(rows) < until and len(rows) in record.committed:
        rows.append(record.committed[len(rows)])
    return rows


def _compare_answer(
    reference: AutoregressiveReference,
    e: ExpectedAnswer,
    record: DraftRecord,
    rows: Sequence[Committed],
    draft: ComparedDraft,
    acceptance: Acceptance,
    *,
    served: bool,
) -> None:
    features = _compare_aux(reference, e, rows, draft)
    embeds, positions = _compare_inputs(reference, e, rows, draft)
    first = e.answer.prompt_len - 1
    found = _run_rows(reference, features, embeds, positions, first)
    _compare_rows(rows, found, first, draft)
    logits = found.logits.cpu()  # rows from ``first`` on
    cycles = [c for c in record.cycles if first < c.num_rows <= len(rows)]
    states = [
        CycleState(c, found.features[c.num_rows - 1], logits[c.num_rows - 1 - first])
        for c in cycles
    ]
    DraftCycles(reference, e, rows, draft).run(states, found.memory, acceptance, served=served)


def _compare_aux(
    reference: AutoregressiveReference,
    e: ExpectedAnswer,
    rows: Sequence[Committed],
    draft: ComparedDraft,
) -> Tensor:
    """Compare aux rows and fused features; return the expected features [n, Hd]."""
    m = reference.manifest
    aux = torch.stack([r.aux for r in rows])
    parts = aux.chunk(len(m.aux_layers), dim=-1)
    for k, name, part in zip(m.aux_layers, m.aux_names, parts, strict=True):
        errors = row_errors(part, e.verified.aux[k][: len(rows)])
        draft.aux.append(RowErrors(draft.case, f"aux_hidden_states[{name}]", errors))
    features = reference.draft.fuse(aux.to(reference.target.device))
    errors = row_errors(torch.stack([r.fused for r in rows]), features)
    draft.fused.append(RowErrors(draft.case, "features", errors))
    return features


def _compare_inputs(
    reference: AutoregressiveReference,
    e: ExpectedAnswer,
    rows: Sequence[Committed],
    draft: ComparedDraft,
) -> tuple[Tensor, Tensor]:
    """Compare inputs; return the expected embeddings and positions of the rows."""
    embeds = reference.prompt_embeds(e.answer, rows[0].embeds.dtype)[: len(rows)]
    positions = reference.positions(torch.arange(len(rows)), e.positions)
    given = torch.stack([r.embeds for r in rows])
    draft.inputs_embeds.append(Compared(draft.case, "inputs_embeds", given, embeds))
    given = torch.stack([r.position for r in rows])
    draft.position_ids.append(Compared(draft.case, "position_ids", given, positions))
    return embeds, positions


def _run_rows(
    reference: AutoregressiveReference,
    features: Tensor,
    embeds: Tensor,
    positions: Tensor,
    first: int,
) -> DraftRows:
    """Run step 0, from true features; logits of rows from ``first`` on."""
    mask = torch.ones(len(embeds), len(embeds), dtype=torch.bool).tril()
    wanted = torch.arange(min(first, len(embeds)), len(embeds))
    return reference.draft.run(embeds.to(features), features, positions.T, mask, logit_rows=wanted)


def _compare_rows(
    rows: Sequence[Committed], found: DraftRows, first: int, draft: ComparedDraft
) -> None:
    errors = row_errors(torch.stack([r.features for r in rows]), found.features)
    draft.features.append(RowErrors(draft.case, "features_out.step0", errors))
    ours = [r.logits for r in rows[first:]]
    draft.logits += logit_errors(draft.case, "logits.step0", ours, found.logits.cpu())
