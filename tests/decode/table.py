"""A draft whose logits are a table by path, and the dynamic tree of such a table by brute force.

Shapes: B sequences, m rows of each in one run, k topk, T tree nodes, Vd draft vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.decode.forward.runner import AttentionMetadata
from trt_eagle3.decode.speculation.dynamic_tree import DynamicTree
from trt_eagle3.decode.speculation.grow import DraftInputs

Path = tuple[int, ...]  # target tokens after the root
Table = Callable[[int, Path], Tensor]  # logits f32 [Vd] of sequence b after a path


class _Tokens:
    """In place of an embedding table: a token's row is the token."""

    @staticmethod
    def lookup(tokens: Tensor) -> Tensor:
        return tokens[..., None].float()


class TableDraft:
    """Stands in for ``DraftRunner``. Its features name a node, its cache remembers which node wrote
    each slot.

    Every row must be fed the features of its parent, stand at its depth's rope position, and see
    its own ancestors and itself and nothing else of the tree: anything else is an
    ``AssertionError``.
    """

    def __init__(
        self, table: Table, num_rows: Sequence[int], positions: Sequence[int], shift: int = 0
    ) -> None:
        """``shift``: target ids are draft ids plus this."""
        self.embedding = _Tokens()
        self.rows_run = 0
        self._table = table
        self._num_rows, self._positions = num_rows, positions
        self._shift = shift
        self._paths: list[Path] = [()]  # by the number that stands in the features
        self._slots: list[dict[int, Path]] = [{} for _ in num_rows]
        self._pages = torch.arange(len(num_rows), dtype=torch.int32)[:, None]

    def inputs(self, roots: Sequence[int]) -> DraftInputs:
        """The sequences after their last committed rows."""
        batch = len(self._num_rows)
        return DraftInputs(
            logits=torch.stack([self._table(b, ()) for b in range(batch)]),
            features=torch.zeros(batch, 1),
            num_computed_tokens=torch.tensor(self._num_rows, dtype=torch.int32),
            roots=torch.tensor(roots),
            positions=torch.tensor(self._positions, dtype=torch.int32),
            state_inputs={"page_table": self._pages},
        )

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + self._shift

    def forward(
        self, embeds: Tensor, features: Tensor, metadata: AttentionMetadata, logit_rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        batch, count = embeds.shape[:2]
        assert torch.equal(logit_rows, torch.arange(count).expand(batch, -1)), (
            "logits of other rows wanted"
        )
        assert list(metadata.counts) == [count] * batch
        assert torch.equal(metadata.state_inputs["page_table"], self._pages), (
            "pages of other sequences"
        )
        rows = [
            [self._row(b, i, embeds, features, metadata) for i in range(count)]
            for b in range(batch)
        ]
        self.rows_run += count
        logits = torch.stack(
            [torch.stack([self._table(b, path) for path in paths]) for b, paths in enumerate(rows)]
        )
        return logits, torch.tensor([[[self._number(path)] for path in paths] for paths in rows])

    def _row(
        self, b: int, i: int, embeds: Tensor, features: Tensor, metadata: AttentionMetadata
    ) -> Path:
        path = (*self._paths[int(features[b, i, 0])], int(embeds[b, i, 0]))
        first, tail = int(metadata.past[b]), metadata.mask.shape[2]
        written = self._slots[b]
        written[first + tail - embeds.shape[1] + i] = path
        unmasked = range(self._num_rows[b], first)  # every row of this run sees them
        masked = [first + j for j in range(tail) if metadata.mask[b, i, j]]
        visible = sorted(written[slot] for slot in [*unmasked, *masked])
        assert visible == [path[:n] for n in range(1, len(path) + 1)], (
            f"row of path {path} sees {visible}"
        )
        position = [int(p) for p in metadata.positions[:, b, i]]
        assert position == [self._positions[b] + len(path) - 1] * 3, (
            f"row of path {path} stands at {position}"
        )
        return path

    def _number(self, path: Path) -> float:
        self._paths.append(path)
        return float(len(self._paths) - 1)


@dataclass(frozen=True)
class Node:
    """A candidate of a dynamic tree, by its path of target tokens."""

    path: Path
    score: float


def brute_force(table: Table, b: int, tree: DynamicTree, shift: int = 0) -> list[Path]:
    """Paths of the nodes that are kept, in the order in which they were considered, as EAGLE-2
    defines them.

    Scores are float32 sums from the root on, so that what ties for the one ties for the other.
    """

    def children(node: Node) -> list[Node]:
        logits = table(b, node.path)
        log_probs = logits - logits.logsumexp(0)
        best = sorted(range(len(log_probs)), key=lambda t: -float(log_probs[t]))[: tree.topk]
        return [
            Node((*node.path, t + shift), float(torch.tensor(node.score) + log_probs[t]))
            for t in best
        ]

    level = children(Node((), 0.0))
    considered = list(level)
    for _ in range(tree.depth - 1):
        frontier = sorted(level, key=lambda node: -node.score)[: tree.topk]
        level = [child for node in frontier for child in children(node)]
        considered += level
    order = sorted(range(len(considered)), key=lambda i: -considered[i].score)
    return [considered[i].path for i in sorted(order[: tree.num_nodes - 1])]


def paths_of(tokens: Tensor, parents: Tensor) -> list[Path]:
    """Paths of the nodes but the root, from tokens int64 [T] and parents int64 [T]."""
    paths: list[Path] = [()]
    for token, parent in zip(tokens.tolist()[1:], parents.tolist()[1:], strict=True):
        assert 0 <= parent < len(paths), f"node {len(paths)} has parent {parent}"
        paths.append((*paths[parent], token))
    return paths[1:]
