"""Gates on cycles: the draft's own steps, what is proposed, and how much of it is accepted.

Shapes: n committed rows, Hd draft hidden, Vd draft vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.parity.board import Board
from trt_eagle3.parity.cycles import Committed, Cycle
from trt_eagle3.parity.draft import KeysValues
from trt_eagle3.parity.drafting import Acceptance, DraftReference
from trt_eagle3.parity.metrics import row_errors
from trt_eagle3.parity.target_check import CheckedTarget
from trt_eagle3.parity.token_check import parents_of, path_rows
from trt_eagle3.parity.trace import rows_of

__all__ = ["STEPS", "CycleChecker", "CycleState"]

STEPS = 4
"""Draft steps that are compared: the one from true features, and three on the draft's own."""

Level = Sequence[tuple["CycleState", int]]
"""Rows of one depth over all cycles: the cycle, and the row in it."""


class CycleChecker:
    """The cycles of one answer, after its committed ``rows``."""

    def __init__(
        self, board: Board, reference: DraftReference, t: CheckedTarget, rows: Sequence[Committed]
    ) -> None:
        self._board, self._ref, self._t, self._rows = board, reference, t, rows
        self._case, self._dtype = t.answer.name, rows[0].embeds.dtype
        known = t.answer.token_ids[: t.answer.prompt_len + t.answer.agreed]
        self._table = reference.target.embed(known).cpu().to(self._dtype)

    def run(self, states: Sequence[CycleState], memory: KeysValues, acceptance: Acceptance) -> None:
        """All cycles level by level: rows of the same depth run together, each seeing its own
        cycle's past alone.

        Args:
            memory: the reference's keys and values of the committed rows.
        """
        columns: dict[tuple[int, int], int] = {}  # (cycle, row) -> column of its keys and values
        depth = 1
        while level := [
            (s, i) for s in states for i, row in enumerate(s.cycle.rows) if row.depth == depth
        ]:
            memory = self._run_level(level, depth, memory, columns)
            depth += 1
        for s in states:
            self._check_proposals(s)
            self._accept(s, acceptance)

    def _run_level(
        self, level: Level, depth: int, memory: KeysValues, columns: dict[tuple[int, int], int]
    ) -> KeysValues:
        fed = torch.stack([s.features(s.cycle.rows[i].parent) for s, i in level])
        numbers = torch.tensor([s.cycle.length + depth - 1 for s, _ in level])
        places = self._ref.positions(numbers, self._t.positions)
        rows = [s.cycle.rows[i] for s, i in level]
        given = torch.stack([r.position for r in rows])
        self._board.add_exact(
            "draft.position_ids", given, places, self._case, f"position_ids.step{depth}"
        )
        embeds = torch.stack([r.embeds for r in rows]).to(fed)
        found = self._ref.draft.run(embeds, fed, places.T, self._mask(level, columns), memory)
        for at, (s, i) in enumerate(level):
            s.put(i, found.features[at], found.logits[at].cpu())
        if depth < STEPS:
            errors = row_errors(torch.stack([r.features for r in rows]), found.features)
            self._board.add_rows("draft.features", errors, self._case, f"features_out.step{depth}")
            pairs = [(r.logits, wanted) for r, wanted in zip(rows, found.logits.cpu(), strict=True)]
            self._add_logits(
                [(ours, wanted) for ours, wanted in pairs if ours is not None],
                f"logits.step{depth}",
            )
        return [
            (torch.cat([k, new_k]), torch.cat([v, new_v]))
            for (k, v), (new_k, new_v) in zip(memory, found.memory, strict=True)
        ]

    def _add_logits(self, pairs: Sequence[tuple[Tensor, Tensor]], name: str) -> None:
        if pairs:
            ours, wanted = (torch.stack(side) for side in zip(*pairs, strict=True))
            self._board.add_rows("draft.logits", row_errors(ours, wanted), self._case, name)

    def _mask(self, level: Level, columns: dict[tuple[int, int], int]) -> Tensor:
        """bool [T, n + all rows so far]; the level's own columns are added."""
        num_rows = len(self._rows)
        columns |= {(id(s), i): num_rows + len(columns) + at for at, (s, i) in enumerate(level)}
        mask = torch.zeros(len(level), num_rows + len(columns), dtype=torch.bool)
        for at, (s, i) in enumerate(level):
            mask[at, : s.cycle.length] = True
            mask[at, [columns[id(s), row] for row in (*s.ancestors(i), i)]] = True
        return mask

    def _check_proposals(self, s: CycleState) -> None:
        """Every drafted token and every node is among the best of its parent, by the engine's
        own logits.
        """
        root = self._rows[s.cycle.length - 1].logits
        wrong, count = [], 0
        for i, row in enumerate(s.cycle.rows):
            parent = root if row.parent < 0 else s.cycle.rows[row.parent].logits
            best = self._best(parent)
            place = _same_row(self._ref.embed(best, self._dtype), row.embeds)
            s.tokens[i] = None if place is None else int(best[place])
            whole = row.parent < 0 or row.seen == s.cycle.rows[row.parent].seen | {row.parent}
            count += 1
            if place is None or not whole:
                wrong.append(f"drafted row {i} at depth {row.depth}")
        if s.cycle.verify is not None:
            count += self._place_nodes(s, root, wrong)
        self._board.count("draft.proposals", nodes=count)
        detail = f"{wrong[0]}: not a token of its parent's best {self._ref.width}" if wrong else ""
        self._board.add(
            "draft.proposals",
            len(wrong),
            self._case,
            "proposals",
            s.cycle.length if wrong else None,
            detail,
        )

    def _place_nodes(self, s: CycleState, root: Tensor | None, wrong: list[str]) -> int:
        """Rank and draft row of every node of the verified tree."""
        assert s.cycle.verify is not None
        rows = rows_of(s.cycle.verify)
        embeds = rows.cut(s.cycle.verify.inputs["inputs_embeds"])
        by_path = {s.path(i): i for i in range(len(s.cycle.rows))}
        for node, parent in enumerate(parents_of(rows.mask)):
            if node == 0:
                s.nodes.append(_Node(-1, 0, (), None))
                continue
            above = s.nodes[parent]
            logits = (
                root
                if above.path == ()
                else None
                if above.row is None
                else s.cycle.rows[above.row].logits
            )
            best = self._best(logits)
            place = _same_row(self._ref.target.embed(best).cpu().to(embeds.dtype), embeds[node])
            token = None if place is None else int(best[place])
            path = (*above.path, token)
            if place is None:
                wrong.append(f"node {node} at depth {len(path)}")
            s.nodes.append(_Node(parent, -1 if place is None else place, path, by_path.get(path)))
        return len(s.nodes) - 1

    def _best(self, logits: Tensor | None) -> Tensor:
        if logits is None:
            return torch.empty(0, dtype=torch.int64)
        return self._ref.target_ids(logits.topk(min(self._ref.width, len(logits))).indices)

    def _accept(self, s: CycleState, acceptance: Acceptance) -> None:
        """What the verified tree's shape would have had accepted, by the engine's proposals and
        by the reference's.
        """
        answer, verify = self._t.answer, s.cycle.verify
        if verify is None or len(s.nodes) < 2:
            return
        known = answer.prompt_len + answer.agreed
        depth = max(len(node.path) for node in s.nodes)
        if s.cycle.length + depth >= known:  # the answer ends inside this tree
            return
        truth = answer.token_ids[s.cycle.length + 1 : s.cycle.length + 1 + depth].tolist()
        engine = len(path_rows(verify, rows_of(verify), self._table)) - 1
        acceptance.add(depth, engine, s.reference_length(truth, self._ref))


def _same_row(rows: Tensor, wanted: Tensor) -> int | None:
    same = (rows == wanted).all(dim=-1).nonzero().flatten() if len(rows) else torch.empty(0)
    return int(same[0]) if len(same) else None


@dataclass(frozen=True)
class _Node:
    """A node of a verified tree: rank among its parent's best, tokens from the root, draft row
    if it has one.
    """

    parent: int
    rank: int
    path: tuple[int | None, ...]
    row: int | None


class CycleState:
    """A cycle in the making: what the reference has given for its rows, and what the engine's
    rows turn out to be.
    """

    def __init__(self, cycle: Cycle, features: Tensor, logits: Tensor) -> None:
        self.cycle, self._root, self._root_logits = cycle, features, logits
        self._features: dict[int, Tensor] = {}
        self._logits: dict[int, Tensor] = {}
        self.tokens: dict[int, int | None] = {}
        self.nodes: list[_Node] = []

    def features(self, row: int) -> Tensor:
        """[Hd]: what the reference feeds to the children of a row; -1 is the last committed one."""
        return self._root if row < 0 else self._features[row]

    def put(self, row: int, features: Tensor, logits: Tensor) -> None:
        """Note what the reference made of a row."""
        self._features[row], self._logits[row] = features, logits

    def ancestors(self, row: int) -> set[int]:
        """Rows of this cycle above a row."""
        found = set()
        while (row := self.cycle.rows[row].parent) >= 0:
            found.add(row)
        return found

    def path(self, row: int) -> tuple[int | None, ...]:
        """Tokens from the root to a drafted row."""
        above = [*sorted(self.ancestors(row)), row]
        return tuple(self.tokens[i] for i in above)

    def reference_length(self, truth: list[int], reference: DraftReference) -> int:
        """How many true tokens the reference's ranks would have put into a tree of this shape."""
        node, length, logits = 0, 0, self._root_logits
        for token in truth:
            children = {n.rank: i for i, n in enumerate(self.nodes) if n.parent == node and i}
            if not children:
                break
            best = reference.target_ids(logits.topk(max(children) + 1).indices).tolist()
            rank = best.index(token) if token in best else -1
            if rank not in children:
                break
            length += 1
            node = children[rank]
            row = self.nodes[node].row
            if row is None or self.nodes[node].path[-1] != token:
                break
            logits = self._logits[row]
        return length
