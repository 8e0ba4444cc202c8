"""Proposals: the tokens that the engine drafted in a cycle, and those of the reference.

Tokens are identified by their embeddings. Shapes: Hd draft hidden, Vd draft vocab.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.parity.record.cycles import Cycle
from trt_eagle3.parity.record.trace import rows_of
from trt_eagle3.parity.record.trees import parents_of
from trt_eagle3.parity.reference.compared_draft import Proposals
from trt_eagle3.parity.reference.drafting import AutoregressiveReference

__all__ = ["CycleState", "read_proposals"]


@dataclass(frozen=True)
class Node:
    """A node of a verified tree.

    Attributes:
        rank: among its parent's best tokens.
        path: tokens from the root.
        row: its draft row, if it has one.
    """

    parent: int
    rank: int
    path: tuple[int | None, ...]
    row: int | None


class CycleState:
    """State of a cycle: the reference's outputs, and the tokens of the engine's rows."""

    def __init__(self, cycle: Cycle, features: Tensor, logits: Tensor) -> None:
        self.cycle, self._root, self._root_logits = cycle, features, logits
        self._features: dict[int, Tensor] = {}
        self._logits: dict[int, Tensor] = {}
        self.tokens: dict[int, int | None] = {}
        self.nodes: list[Node] = []

    def features(self, row: int) -> Tensor:
        """[Hd]: the reference's input for the children of a row; -1 is the last committed row."""
        return self._root if row < 0 else self._features[row]

    def put(self, row: int, features: Tensor, logits: Tensor) -> None:
        """Store the reference's outputs of a row."""
        self._features[row], self._logits[row] = features, logits

    def ancestors(self, row: int) -> set[int]:
        """Return the rows of this cycle above a row."""
        found = set()
        while (row := self.cycle.rows[row].parent) >= 0:
            found.add(row)
        return found

    def path(self, row: int) -> tuple[int | None, ...]:
        """Return the tokens from the root to a drafted row."""
        above = [*sorted(self.ancestors(row)), row]
        return tuple(self.tokens[i] for i in above)

    def reference_length(self, truth: list[int], reference: AutoregressiveReference) -> int:
        """Return how many true tokens the reference would draft in a tree of this shape."""
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


def read_proposals(
    s: CycleState, root: Tensor | None, reference: AutoregressiveReference
) -> Proposals:
    """Find the token of every drafted row and node, which must be among the best of its parent.

    Fills in ``s.tokens`` and ``s.nodes``. The engine may take any of equal logits, which 16-bit
    dtypes have many of.

    Args:
        root: [Vd], the engine's draft logits of the last committed row.
    """
    wrong = [*_read_rows(s, root, reference), *_read_nodes(s, root, reference)]
    count = len(s.cycle.rows) + max(0, len(s.nodes) - 1)
    rule = f"not a token of its parent's best {reference.width}"
    return Proposals(s.cycle.num_rows, count, wrong, rule)


def _read_rows(
    s: CycleState, root: Tensor | None, reference: AutoregressiveReference
) -> Iterator[str]:
    if reference.mask_row is not None:  # rows hold the mask token
        return
    for i, row in enumerate(s.cycle.rows):
        parent = None if row.parent < 0 else s.cycle.rows[row.parent]
        best = _best(root if parent is None else parent.logits, reference)
        place = _same_row(reference.embed(best.tokens, row.embeds.dtype), row.embeds)
        s.tokens[i] = None if place is None else int(best.tokens[place])
        whole = parent is None or row.seen == parent.seen | {row.parent}
        if place is None or not whole:
            yield f"drafted row {i} at depth {row.depth}"


def _read_nodes(
    s: CycleState, root: Tensor | None, reference: AutoregressiveReference
) -> Iterator[str]:
    """Find rank and draft row of every node of the verified tree."""
    if s.cycle.verify is None:
        return
    rows = rows_of(s.cycle.verify)
    embeds = rows.cut(s.cycle.verify.inputs["inputs_embeds"])
    count, by_mask = len(s.cycle.rows), reference.mask_row is not None
    by_path = {} if by_mask else {s.path(i): i for i in range(count)}
    s.nodes.append(Node(-1, 0, (), None))
    taken: dict[int, list[int]] = {}
    for node, parent in enumerate(parents_of(rows.mask)[1:], start=1):
        best = _best(_logits_of(s, s.nodes[parent], root), reference)
        place = _same_row(reference.target.embed(best.tokens).cpu().to(embeds.dtype), embeds[node])
        path = (*s.nodes[parent].path, None if place is None else int(best.tokens[place]))
        siblings = taken.setdefault(parent, [])
        rank = -1 if place is None else best.rank(place, siblings)
        row = by_path.get(path)
        if by_mask and len(path) <= count:  # a mask row for each depth
            row = len(path) - 1
        s.nodes.append(Node(parent, rank, path, row))
        if place is None:
            yield f"node {node} at depth {len(path)}"
        else:
            siblings.append(place)


def _logits_of(s: CycleState, node: Node, root: Tensor | None) -> Tensor | None:
    if node.path == ():
        return root
    return None if node.row is None else s.cycle.rows[node.row].logits


@dataclass(frozen=True)
class _Best:
    """``logits`` [n], the largest first, and the target ids int64 [n] of their ``tokens``."""

    logits: Tensor
    tokens: Tensor

    def rank(self, place: int, siblings: Sequence[int]) -> int:
        """Return the rank of the token at ``place`` after the ``siblings`` that precede it.

        Equal logits are ranked in the order of the tree.
        """
        equal = self.logits == self.logits[place]
        return int(equal.nonzero()[0]) + sum(bool(equal[i]) for i in siblings)


def _best(logits: Tensor | None, reference: AutoregressiveReference) -> _Best:
    """Return the best draft tokens of a row: as many as a tree may take, and ties of the last."""
    if logits is None:
        return _Best(torch.empty(0), torch.empty(0, dtype=torch.int64))
    least = logits.topk(min(reference.width, len(logits))).values[-1]
    found = logits.topk(int((logits >= least).sum()))
    return _Best(found.values, reference.target_ids(found.indices))


def _same_row(rows: Tensor, wanted: Tensor) -> int | None:
    same = (rows == wanted).all(dim=-1).nonzero().flatten() if len(rows) else torch.empty(0)
    return int(same[0]) if len(same) else None
