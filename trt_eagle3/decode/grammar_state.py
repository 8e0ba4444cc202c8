"""Where a sequence stands in its grammar, and which tokens that allows at every node of a tree.

Shapes: T tree nodes, V vocab, W = ceil(V / 32) words of a mask, whose bit i of word w is token
32 w + i.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

__all__ = ["GrammarState", "Words", "allows", "fill_trees"]

Words = np.ndarray[Any, np.dtype[np.int32]]
"""Masks on the host: threads that torch knows nothing of write them."""

_ALL = -1  # word of a mask
_MAX_THREADS = 8
_DECAY = 0.9  # per tree, of the share of drafted tokens that the grammar forbade


class GrammarState:
    """A grammar after the tokens of one answer.

    Attributes:
        vocab_size: V.
        finished: an end token was emitted. error: why it can judge no more tokens; empty while it
            can. forbidden: decayed share of drafted tokens that it forbade, of those whose parents
            it allowed.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        end_ids: Sequence[int],
        vocab_size: int,
        *,
        min_tokens: int = 0,
        ignore_eos: bool = False,
    ) -> None:
        """``matcher``: this sequence's own, at its beginning."""
        self._matcher = matcher
        self.vocab_size = vocab_size
        self._ends = frozenset(end_ids)
        self._min_tokens, self._ignore_eos = min_tokens, ignore_eos
        self._count = 0  # tokens of the answer
        self.finished = False
        self.error = ""
        self.forbidden = 1.0

    def advance(self, tokens: Sequence[int]) -> None:
        """The answer has these tokens too."""
        for token in tokens:
            if self.finished or self.error:
                return
            self._count += 1
            if token in self._ends:
                self.finished = True
            elif not self._matcher.consume_token(token):
                self.error = self._matcher.get_error() or f"token {token} was not allowed"

    def after(self, token: int) -> GrammarState | None:
        """A copy that stands one token further; None where ``token`` is forbidden or the last."""
        if self.finished or self.error or token in self._ends:
            return None
        if self._matcher.validate_tokens([token]) != 1:
            return None
        copy = GrammarState(
            self._matcher.deep_copy(),
            tuple(self._ends),
            self.vocab_size,
            min_tokens=self._min_tokens,
            ignore_eos=self._ignore_eos,
        )
        copy._count = self._count
        copy.advance([token])
        return copy

    def fill_next(self, row: Words) -> None:
        """Write what is allowed next into ``row`` int32 [W], on the host."""
        self.fill([-1], [-1], row[None])

    def fill(self, tokens: Sequence[int], parents: Sequence[int], rows: Words) -> None:
        """``fill_trees`` of one tree."""
        fill_trees([(self, tokens, parents, rows)])

    @property
    def live(self) -> bool:
        """Whether it says anything about what follows."""
        return not (self.finished or self.error)

    def judge(self, tokens: Sequence[int], parents: Sequence[int], rows: Words) -> None:
        """End ``fill_trees``: whether the matcher broke down, end tokens that must wait, and how
        much of what was drafted is forbidden.
        """
        if self._matcher.is_error():
            self.error = self._matcher.get_error()
            rows.fill(_ALL)
            return
        reached, depths = [True], [0]
        num_seen = num_forbidden = 0
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if node:
                allowed = allows(rows[parent], token)
                num_seen += reached[parent]
                num_forbidden += reached[parent] and not allowed
                reached.append(reached[parent] and allowed and token not in self._ends)
                depths.append(depths[parent] + 1)
            if not reached[node]:
                rows[node] = _ALL
            elif self._ignore_eos or self._count + depths[node] < self._min_tokens:
                self._postpone_end(rows[node])
        if num_seen:
            share = num_forbidden / num_seen
            self.forbidden = _DECAY * self.forbidden + (1 - _DECAY) * share

    def _postpone_end(self, row: Words) -> None:
        """Take the end tokens out of ``row``, if that leaves any."""
        others = row.copy()
        for token in self._ends:
            others[token >> 5] &= ~_bit(token)
        if others.any():
            row[:] = others

    def entry(self, index: int, path: Sequence[int]) -> tuple[LLMatcher, int, list[int]]:
        """As ``LLExecutor`` wants it: masks of here, and after every token of ``path``, from row
        ``index`` on.
        """
        ends = next((i for i, token in enumerate(path) if token in self._ends), len(path))
        return self._matcher, index, list(path[:ends])


Job = tuple[GrammarState, Sequence[int], Sequence[int], Words]


def fill_trees(jobs: Sequence[Job]) -> None:
    """Write what is allowed after every node of a tree into its rows int32 [T, W], on the host; of
    several trees on several threads, without Python's lock.

    A job is a state, the tokens of the nodes, parents first (the root's stands in the answer
    already), the parents (the root's is -1), and the rows. A node that cannot be accepted, and an
    end token, allow all: nothing that follows is read. So does all where the grammar can judge no
    more: ``error`` says so.
    """
    for _, _, _, rows in jobs:
        rows.fill(_ALL)
    live = [job for job in jobs if job[0].live]
    paths = [_paths(parents) for _, _, parents, _ in live]
    for turn in range(max(map(len, paths), default=0)):  # a matcher walks one path at a time
        _fill_paths([(job, p[turn]) for job, p in zip(live, paths, strict=True) if turn < len(p)])
    for state, tokens, parents, rows in live:
        state.judge(tokens, parents, rows)


def _fill_paths(paths: Sequence[tuple[Job, Sequence[int]]]) -> None:
    """Fill the rows of one path, from the root on, of each of several trees."""
    entries, total = [], 0
    for (state, tokens, _, _), nodes in paths:
        entries.append(state.entry(total, [tokens[node] for node in nodes[1:]]))
        total += len(nodes)
    width = paths[0][0][3].shape[1]
    found = np.full((total, width), _ALL, dtype=np.int32)
    target = found.ctypes.data, 4 * width, total
    if drafted := [entry for entry in entries if entry[2]]:
        _executor().unsafe_compute_mask_ptr_with_draft_token(drafted, *target)
    if bare := [(matcher, index) for matcher, index, path in entries if not path]:
        _executor().unsafe_compute_mask_ptr(bare, *target)
    for ((_, _, _, rows), nodes), (_, index, _) in zip(paths, entries, strict=True):
        rows[list(nodes)] = found[index : index + len(nodes)]


def _paths(parents: Sequence[int]) -> list[list[int]]:
    """Nodes from the root to each leaf."""
    found = []
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        found.append(path[::-1])
    return found


@cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor(max(min((os.cpu_count() or 2) - 1, _MAX_THREADS), 1))


def allows(row: Words, token: int) -> bool:
    """Whether ``row`` int32 [W] allows ``token``."""
    return bool(int(row[token >> 5]) & _bit(token))


def _bit(token: int) -> int:
    """Of its word, as int32."""
    bit = token & 31
    return 1 << bit if bit < 31 else -(1 << 31)
