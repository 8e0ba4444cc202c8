"""Draft cycles: the draft's own steps, level by level over all cycles of an answer.

Shapes: n committed rows, T rows of a level, Hd draft hidden, Vd draft vocab.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trt_eagle3.parity.metrics import Compared, RowErrors, row_errors
from trt_eagle3.parity.record.cycles import Committed, Drafted
from trt_eagle3.parity.record.trace import rows_of
from trt_eagle3.parity.record.trees import path_rows
from trt_eagle3.parity.reference.compared_draft import ComparedDraft, logit_errors
from trt_eagle3.parity.reference.draft import DraftRows, KeysValues
from trt_eagle3.parity.reference.drafting import Acceptance, AutoregressiveReference
from trt_eagle3.parity.reference.expected import ExpectedAnswer
from trt_eagle3.parity.reference.proposals import CycleState, read_proposals

__all__ = ["STEPS", "CycleState", "DraftCycles"]

STEPS = 4
"""Number of compared draft steps: one from true features, and three on the draft's own."""

Level = Sequence[tuple[CycleState, int]]
"""Rows of one depth over all cycles: the cycle, and the row in it."""


class DraftCycles:
    """Runs the cycles of one answer after its committed ``rows``; fills in ``draft``."""

    def __init__(
        self,
        reference: AutoregressiveReference,
        expected: ExpectedAnswer,
        rows: Sequence[Committed],
        draft: ComparedDraft,
    ) -> None:
        self._ref, self._expected, self._rows, self._draft = reference, expected, rows, draft
        answer = expected.answer
        known = answer.token_ids[: answer.prompt_len + answer.agreed]
        self._table = reference.target.embed(known).cpu().to(rows[0].embeds.dtype)

    def run(
        self,
        states: Sequence[CycleState],
        kv: KeysValues,
        acceptance: Acceptance,
        *,
        served: bool,
    ) -> None:
        """Run all cycles, level by level.

        Rows of the same depth run in one batch; each sees only the rows of its own cycle.

        Args:
            kv: the reference's keys and values of the committed rows.
            served: this answer counts in ``acceptance.served``.
        """
        columns: dict[tuple[int, int], int] = {}  # (cycle, row) -> column of its keys and values
        depth = 1
        while level := [
            (s, i) for s in states for i, row in enumerate(s.cycle.rows) if row.depth == depth
        ]:
            kv = self._run_level(level, depth, kv, columns)
            depth += 1
        for s in states:
            root = self._rows[s.cycle.num_rows - 1].logits
            self._draft.proposals.append(read_proposals(s, root, self._ref))
            self._count_accepted(s, acceptance, served=served)

    def _run_level(
        self, level: Level, depth: int, kv: KeysValues, columns: dict[tuple[int, int], int]
    ) -> KeysValues:
        rows, mask = [s.cycle.rows[i] for s, i in level], self._ref.mask_row
        given = [s.features(row.parent) for (s, _), row in zip(level, rows, strict=True)]
        fed = torch.stack(given if mask is None else [mask.features] * len(rows))
        positions = self._positions(level, rows, depth)
        embeds = torch.stack([r.embeds for r in rows])
        if mask is not None:
            wanted = mask.embeds.cpu().to(embeds.dtype).expand(len(rows), -1)
            name = f"inputs_embeds.step{depth}"
            self._draft.inputs_embeds.append(Compared(self._draft.case, name, embeds, wanted))
        embeds = embeds.to(fed)
        found = self._ref.draft.run(embeds, fed, positions.T, self._mask(level, columns), kv)
        for at, (s, i) in enumerate(level):
            s.put(i, found.features[at], found.logits[at].cpu())
        if depth < STEPS:
            self._compare(rows, found, depth)
        return [
            (torch.cat([k, new_k]), torch.cat([v, new_v]))
            for (k, v), (new_k, new_v) in zip(kv, found.memory, strict=True)
        ]

    def _positions(self, level: Level, rows: Sequence[Drafted], depth: int) -> Tensor:
        """[T, 3]: the expected positions of the rows; records a comparison with the given ones."""
        numbers = torch.tensor([s.cycle.num_rows + depth - 1 for s, _ in level])
        expected = self._ref.positions(numbers, self._expected.positions)
        given = torch.stack([r.position for r in rows])
        name = f"position_ids.step{depth}"
        self._draft.position_ids.append(Compared(self._draft.case, name, given, expected))
        return expected

    def _compare(self, rows: Sequence[Drafted], found: DraftRows, depth: int) -> None:
        draft = self._draft
        errors = row_errors(torch.stack([r.features for r in rows]), found.features)
        draft.features.append(RowErrors(draft.case, f"features_out.step{depth}", errors))
        ours = [r.logits for r in rows]
        draft.logits += logit_errors(draft.case, f"logits.step{depth}", ours, found.logits.cpu())

    def _mask(self, level: Level, columns: dict[tuple[int, int], int]) -> Tensor:
        """bool [T, n + all rows so far]; adds the level's own columns."""
        num_rows = len(self._rows)
        columns |= {(id(s), i): num_rows + len(columns) + at for at, (s, i) in enumerate(level)}
        mask = torch.zeros(len(level), num_rows + len(columns), dtype=torch.bool)
        for at, (s, i) in enumerate(level):
            mask[at, : s.cycle.num_rows] = True
            mask[at, [columns[id(s), row] for row in (*s.ancestors(i), i)]] = True
        return mask

    def _count_accepted(self, s: CycleState, acceptance: Acceptance, *, served: bool) -> None:
        """Count the accepted depth of the verified tree, for the engine's and the reference's
        proposals.
        """
        answer, verify = self._expected.answer, s.cycle.verify
        if verify is None or len(s.nodes) < 2:
            return
        known = answer.prompt_len + answer.agreed
        depth = max(len(node.path) for node in s.nodes)
        if s.cycle.num_rows + depth >= known:  # the answer ends inside this tree
            return
        truth = answer.token_ids[s.cycle.num_rows + 1 : s.cycle.num_rows + 1 + depth].tolist()
        engine = len(path_rows(verify, rows_of(verify), self._table)) - 1
        reference = s.reference_length(truth, self._ref)
        acceptance.recorded.add(depth, engine, reference)
        if served:
            room = answer.prompt_len + answer.served_len - (s.cycle.num_rows + 1)
            acceptance.served.add(depth, engine, reference, room)
