"""Masks of drafted trees, by llguidance's own threads: which tokens grammars allow at every node.

A matcher computes the masks of a run of tokens in one call, without Python's lock, into memory that
the device copies from. A chain is one run. Of a tree, each path is one from where it leaves those
before it; a run whose nodes do not stand side by side goes through memory of its own.

Shapes: n sequences, T tree nodes, W = ceil(V / 32) words of a mask of V tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from trt_eagle3.decode.grammar_state import ALL_ALLOWED, GrammarState, Words, allows

if TYPE_CHECKING:
    from llguidance import LLExecutor

__all__ = ["Job", "fill_next", "fill_trees"]

_MAX_THREADS = 8

Job = tuple[GrammarState, Sequence[int], Sequence[int]]
"""A state, the tokens of a tree's nodes, parents first (the root's stands in the answer already),
and the parents (the root's is -1)."""


def fill_next(state: GrammarState, row: Words) -> None:
    """Write what ``state`` allows next into ``row`` int32 [W], on the host."""
    fill_trees([(state, [-1], [-1])], row[None, None])


def fill_trees(jobs: Sequence[Job | None], masks: Words) -> None:
    """Write what each of n jobs allows after every node of its tree into ``masks`` int32 [n, T, W],
    on the host, without gaps.

    A node that cannot be accepted, and an end token, allow all: nothing that follows is read. So
    does all where there is no job, or the grammar can judge no more: ``error`` says so.
    """
    walks = []
    for i, job in enumerate(jobs):
        if job is None or not job[0].live:
            masks[i] = ALL_ALLOWED
        else:
            walks.append(_Walk(*job, masks[i], i * masks.shape[1]))
    going = walks
    while going:  # a matcher walks one run at a time
        runs = [run for walk in going if (run := walk.next_run()) is not None]
        _fill_runs(runs, masks)
        going = [run.walk for run in runs]
    for walk in walks:
        walk.state.judge(walk.tokens, walk.parents, walk.rows)


@dataclass
class _Walk:
    """A matcher on its way through one tree, run by run.

    Attributes:
        rows: int32 [T, W]. first: the row of all masks that is this tree's first.
    """

    state: GrammarState
    tokens: Sequence[int]
    parents: Sequence[int]
    rows: Words
    first: int
    _done: set[int] = field(default_factory=set)
    _left: Iterator[tuple[int, ...]] | None = None

    def next_run(self) -> _Run | None:
        """The nodes of the next path that have no masks yet and may be accepted; None where there
        are no more.
        """
        if self._left is None:
            self._left = iter(_paths(tuple(self.parents)))
        for path in self._left:
            new = next(i for i, node in enumerate(path) if node not in self._done)
            self._done.update(path)
            if self._allowed(path[: new + 1]):
                ends = (i for i in range(new + 1, len(path)) if self._is_end(path[i]))
                return _Run(self, path[:new], path[new : next(ends, len(path))])
        return None

    def _allowed(self, path: Sequence[int]) -> bool:
        """Whether the tokens of ``path``, of which the last node alone has no mask, can all be
        accepted.
        """
        return all(
            allows(self.rows[parent], self.tokens[node]) and not self._is_end(node)
            for parent, node in pairwise(path)
        )

    def _is_end(self, node: int) -> bool:
        return self.state.is_end(self.tokens[node])


@dataclass(frozen=True)
class _Run:
    """Masks of ``nodes``, each the parent of the next, behind the nodes ``above``, whose first is
    the root: the matcher stands after that one.
    """

    walk: _Walk
    above: Sequence[int]
    nodes: Sequence[int]

    @property
    def in_place(self) -> bool:
        """Whether the masks stand side by side."""
        return self.nodes[-1] - self.nodes[0] == len(self.nodes) - 1

    def enter(self) -> None:
        """Let the matcher stand at the first node."""
        if self.above:
            self.walk.state.matcher.consume_tokens(self._entering)

    def leave(self) -> None:
        """Undo ``enter``."""
        if self.above:
            self.walk.state.matcher.rollback(len(self._entering))

    @property
    def drafted(self) -> list[int]:
        """Tokens after the first node."""
        return [self.walk.tokens[node] for node in self.nodes[1:]]

    @property
    def _entering(self) -> list[int]:
        return [self.walk.tokens[node] for node in (*self.above[1:], self.nodes[0])]


def _fill_runs(runs: Sequence[_Run], masks: Words) -> None:
    """Fill the rows of runs, one of a tree each."""
    for run in runs:
        run.enter()
    direct = [(run, run.walk.first + run.nodes[0]) for run in runs if run.in_place]
    _compute(direct, masks.reshape(-1, masks.shape[2]))
    apart, total = [], 0
    for run in runs:
        if not run.in_place:
            apart.append((run, total))
            total += len(run.nodes)
    if apart:
        found = np.full((total, masks.shape[2]), ALL_ALLOWED, dtype=np.int32)
        _compute(apart, found)
        for run, row in apart:
            run.walk.rows[list(run.nodes)] = found[row : row + len(run.nodes)]
    for run in runs:
        run.leave()


def _compute(runs: Sequence[tuple[_Run, int]], rows: Words) -> None:
    """Write the masks of each run into ``rows`` int32 [n, W], from its own row on."""
    target = rows.ctypes.data, 4 * rows.shape[1], len(rows)
    entries = [(run.walk.state.matcher, row, run.drafted) for run, row in runs]
    if drafted := [entry for entry in entries if entry[2]]:
        _executor().unsafe_compute_mask_ptr_with_draft_token(drafted, *target)
    if bare := [(matcher, row) for matcher, row, tokens in entries if not tokens]:
        _executor().unsafe_compute_mask_ptr(bare, *target)


@lru_cache(maxsize=64)
def _paths(parents: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Nodes from the root to each leaf."""
    found = []
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        found.append(tuple(path[::-1]))
    return found


@cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor(max(min((os.cpu_count() or 2) - 1, _MAX_THREADS), 1))
