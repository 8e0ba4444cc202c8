"""Gates on the draft: what it is given, what it makes of it over four steps, what it proposes, how much is accepted.

Shapes: n committed rows, H target hidden, Hd draft hidden, Vd draft vocab, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.checkpoint.tensor_index import read_tensor
from trt_eagle3.config import SpeculationConfig
from trt_eagle3.parity.answers import Answer
from trt_eagle3.parity.board import Board
from trt_eagle3.parity.cycles import Committed, Cycle, Drafted, DraftRecord, read_draft_passes
from trt_eagle3.parity.draft import KeysValues, ReferenceDraft
from trt_eagle3.parity.metrics import row_errors
from trt_eagle3.parity.target import TargetReference
from trt_eagle3.parity.target_check import CheckedTarget
from trt_eagle3.parity.token_check import parents_of, path_rows
from trt_eagle3.parity.trace import rows_of

__all__ = ["STEPS", "Acceptance", "DraftReference", "check_draft"]

STEPS = 4
"""Draft steps that are compared: the one from true features, and three on the draft's own."""


@dataclass
class Acceptance:
    """Cycles in which a position was reached, and accepted there, by the engine and by the reference draft."""

    reached: list[int] = field(default_factory=list)
    engine: list[int] = field(default_factory=list)
    reference: list[int] = field(default_factory=list)

    def add(self, depth: int, engine: int, reference: int) -> None:
        """One cycle whose tree is ``depth`` deep; lengths without the bonus token."""
        for counts in (self.reached, self.engine, self.reference):
            counts += [0] * (depth - len(counts))
        for position in range(depth):
            self.reached[position] += 1
            self.engine[position] += engine > position
            self.reference[position] += reference > position


@dataclass(frozen=True)
class DraftReference:
    """The draft of a checkpoint with the tables around it."""

    draft: ReferenceDraft
    target: TargetReference
    speculation: SpeculationConfig

    @property
    def manifest(self) -> DraftManifest:
        """As the checkpoint says, read again."""
        return self.draft.manifest

    def embed(self, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """[n, Hd] on the CPU: the draft's own table or the target's."""
        if self.manifest.embedding == "target":
            return self.target.embed(token_ids).cpu().to(dtype)
        return read_tensor(self.manifest.tensors["embed_tokens.weight"])[token_ids].to(dtype)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """int64: target ids of draft ids."""
        d2t = self.draft.weights.get("d2t")
        return draft_ids if d2t is None else draft_ids + d2t[draft_ids]

    def prompt_embeds(self, answer: Answer, dtype: torch.dtype) -> Tensor:
        """[P + A - 1, Hd]: row t has token t + 1, or what the manifest puts at image rows."""
        m, embeds = self.manifest, self.embed(answer.token_ids[1:], dtype)
        if m.image_rows == "vision" and answer.vision is not None:
            visual = answer.vision.outputs["visual_embeds"].to(dtype)
            for image, row in enumerate(answer.visual_rows.nonzero().flatten().tolist()):
                place = row - 1 if m.image_rows_rotated else row
                if place >= 0:
                    embeds[place] = visual[image]
        return embeds

    def positions(self, rows: Tensor, target_positions: Tensor, delta: int) -> Tensor:
        """[m, 3]: where draft ``rows`` stand. ``target_positions`` [n + 1, 3]; rows past their end are text."""
        m = self.manifest
        wanted = rows + m.position_shift
        if m.positions == "linear":
            return wanted[:, None].expand(-1, 3)
        known = len(target_positions)
        late = (wanted + delta)[:, None].expand(-1, 3)
        places = torch.where((wanted < known)[:, None], target_positions[wanted.clamp(max=known - 1)], late)
        return places[:, :1].expand(-1, 3) if m.positions == "temporal" else places

    @property
    def width(self) -> int:
        """Best tokens of a node that a tree may take."""
        config = self.speculation
        if config.tree is not None:
            return 1 + max(rank for path in config.tree for rank in path)
        return 1 if config.mode == "chain" else config.topk


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
        _Checker(board, reference, t, record, acceptance).run()
        records.append(record)
        progress()
    rates = [
        (e / n, r / n) for e, r, n in zip(acceptance.engine, acceptance.reference, acceptance.reached, strict=True)
    ]
    for position, (engine, ours) in enumerate(rates):
        detail = f"engine {engine:.3f}, reference {ours:.3f} of {acceptance.reached[position]} cycles"
        board.add("draft.acceptance", abs(engine - ours), "", f"position {position}", None, detail)
    return records


class _Checker:
    """One answer's draft rows. Only rows on the part of the answer that is the same plainly are compared."""

    def __init__(
        self, board: Board, reference: DraftReference, t: CheckedTarget, record: DraftRecord, acceptance: Acceptance
    ) -> None:
        self._board, self._ref, self._t, self._record, self._acceptance = board, reference, t, record, acceptance
        answer = t.answer
        until = answer.prompt_len + answer.agreed - 1  # of a row, the token one ahead must be known too
        count = 0
        while count in record.committed and count < until:
            count += 1
        self._rows: list[Committed] = [record.committed[i] for i in range(count)]
        self._case, self._dtype = answer.name, self._rows[0].embeds.dtype
        self._delta = int(t.positions[-1, 0]) - (len(t.positions) - 1)

    def run(self) -> None:
        """Given rows, then step 0, then the cycles."""
        rows, board, case, m = self._rows, self._board, self._case, self._ref.manifest
        numbers = torch.arange(len(rows))
        aux = torch.stack([r.aux for r in rows])
        for i, k in enumerate(m.aux_layers):
            width = m.target_hidden_size
            errors = row_errors(aux[:, i * width : (i + 1) * width], self._t.aux[k][: len(rows)])
            board.add_rows("draft.aux", errors, case, f"aux_hidden_states[out({k})]")
        expected = self._ref.prompt_embeds(self._t.answer, self._dtype)[: len(rows)]
        board.add_exact("draft.inputs_embeds", torch.stack([r.embeds for r in rows]), expected, case, "inputs_embeds")
        places = self._ref.positions(numbers, self._t.positions, self._delta)
        given = torch.stack([r.position for r in rows])
        board.add_exact("draft.position_ids", given, places, case, "position_ids")
        draft = self._ref.draft
        features = draft.fuse(aux.to(self._ref.target.device))
        board.add_rows("draft.fuse", row_errors(torch.stack([r.fused for r in rows]), features), case, "features")
        first = self._t.answer.prompt_len - 1
        found = draft.run(
            expected.to(features),
            features,
            places.T,
            torch.ones(len(rows), len(rows)).tril().bool(),
            (),
            torch.arange(first, len(rows)),
        )
        self._logits = found.logits.cpu()  # of rows from ``first`` on
        self._compare(rows, found.features.cpu(), self._logits, first)
        self._check_cycles(found.features, found.memory, first)

    def _compare(self, rows: Sequence[Drafted], features: Tensor, logits: Tensor, first: int) -> None:
        """Step 0: features of all rows, logits of those that the engine gave."""
        ours = torch.stack([r.features for r in rows])
        self._board.add_rows("draft.features", row_errors(ours, features), self._case, "features_out.step0")
        pairs = [(r.logits, logits[i]) for i, r in enumerate(rows[first:]) if r.logits is not None]
        if pairs:
            given, wanted = (torch.stack(side) for side in zip(*pairs, strict=True))
            self._board.add_rows("draft.logits", row_errors(given, wanted), self._case, "logits.step0")

    def _check_cycles(self, features: Tensor, memory: KeysValues, first: int) -> None:
        """All cycles level by level: rows of the same depth run together, each seeing its own cycle's past alone."""
        cycles = [c for c in self._record.cycles if first < c.length <= len(self._rows)]
        states = [_State(c, features[c.length - 1], self._logits[c.length - 1 - first]) for c in cycles]
        num_rows = len(self._rows)
        columns: dict[tuple[int, int], int] = {}  # (cycle, row) -> column of its keys and values
        depth = 1
        while level := [(s, i) for s in states for i, row in enumerate(s.cycle.rows) if row.depth == depth]:
            embeds = torch.stack([s.cycle.rows[i].embeds for s, i in level])
            fed = torch.stack([s.features(s.cycle.rows[i].parent) for s, i in level])
            numbers = torch.tensor([s.cycle.length + depth - 1 for s, _ in level])
            places = self._ref.positions(numbers, self._t.positions, self._delta)
            given = torch.stack([s.cycle.rows[i].position for s, i in level])
            self._board.add_exact("draft.position_ids", given, places, self._case, f"position_ids.step{depth}")
            columns |= {(id(s), i): num_rows + len(columns) + at for at, (s, i) in enumerate(level)}
            mask = torch.zeros(len(level), num_rows + len(columns), dtype=torch.bool)
            for at, (s, i) in enumerate(level):
                mask[at, : s.cycle.length] = True
                mask[at, [columns[id(s), row] for row in (*s.ancestors(i), i)]] = True
            found = self._ref.draft.run(embeds.to(features), fed, places.T, mask, memory)
            memory = [
                (torch.cat([k, new_k]), torch.cat([v, new_v]))
                for (k, v), (new_k, new_v) in zip(memory, found.memory, strict=True)
            ]
            for at, (s, i) in enumerate(level):
                s.put(i, found.features[at], found.logits[at].cpu())
            if depth < STEPS:
                self._compare_level(level, found.features.cpu(), found.logits.cpu(), depth)
            depth += 1
        for s in states:
            self._check_proposals(s)
            self._accept(s)

    def _compare_level(self, level: list[tuple[_State, int]], features: Tensor, logits: Tensor, depth: int) -> None:
        rows = [s.cycle.rows[i] for s, i in level]
        ours = torch.stack([r.features for r in rows])
        self._board.add_rows("draft.features", row_errors(ours, features), self._case, f"features_out.step{depth}")
        given = torch.stack([r.logits for r in rows if r.logits is not None])
        self._board.add_rows("draft.logits", row_errors(given, logits), self._case, f"logits.step{depth}")

    def _check_proposals(self, s: _State) -> None:
        """Every drafted token and every node is among the best of its parent, by the engine's own logits."""
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
            "draft.proposals", len(wrong), self._case, "proposals", s.cycle.length if wrong else None, detail
        )

    def _place_nodes(self, s: _State, root: Tensor | None, wrong: list[str]) -> int:
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
            logits = root if above.path == () else None if above.row is None else s.cycle.rows[above.row].logits
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

    def _accept(self, s: _State) -> None:
        """What the verified tree's shape would have had accepted, by the engine's proposals and by the reference's."""
        answer, verify = self._t.answer, s.cycle.verify
        if verify is None or len(s.nodes) < 2:
            return
        known = answer.prompt_len + answer.agreed
        depth = max(len(node.path) for node in s.nodes)
        if s.cycle.length + depth >= known:  # the answer ends inside this tree
            return
        truth = answer.token_ids[s.cycle.length + 1 : s.cycle.length + 1 + depth].tolist()
        table = self._ref.target.embed(answer.token_ids[:known]).cpu().to(self._dtype)
        engine = len(path_rows(verify, rows_of(verify), table)) - 1
        self._acceptance.add(depth, engine, s.reference_length(truth, self._ref))


def _same_row(rows: Tensor, wanted: Tensor) -> int | None:
    same = (rows == wanted).all(dim=-1).nonzero().flatten() if len(rows) else torch.empty(0)
    return int(same[0]) if len(same) else None


@dataclass(frozen=True)
class _Node:
    """A node of a verified tree: rank among its parent's best, tokens from the root, draft row if it has one."""

    parent: int
    rank: int
    path: tuple[int | None, ...]
    row: int | None


class _State:
    """A cycle in the making: what the reference has given for its rows."""

    def __init__(self, cycle: Cycle, features: Tensor, logits: Tensor) -> None:
        self.cycle, self._root, self._root_logits = cycle, features, logits
        self._features: dict[int, Tensor] = {}
        self._logits: dict[int, Tensor] = {}
        self.tokens: dict[int, int | None] = {}
        self.nodes: list[_Node] = []

    def features(self, row: int) -> Tensor:
        return self._root if row < 0 else self._features[row]

    def put(self, row: int, features: Tensor, logits: Tensor) -> None:
        self._features[row], self._logits[row] = features, logits

    def ancestors(self, row: int) -> set[int]:
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
