"""Masks of drafted trees, by llguidance's own threads: which tokens grammars allow at every node.

A matcher computes the masks of a run of tokens in one call, without Python's lock, into memory that
the device copies from. A chain is one run. A tree is several: its first path from the root to a
leaf, then of each other path the nodes that no earlier one has. The first runs of all trees are
computed together, then their second ones. Only nodes that can be accepted have a mask.

Shapes: n trees, T tree nodes, R masks, W = ceil(V / 32) words of a mask of V tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from trt_eagle3.decode.sampling.grammar_state import ALL_ALLOWED, GrammarState, Words

if TYPE_CHECKING:
    from llguidance import LLExecutor

__all__ = ["NO_MASK", "Job", "fill_next", "fill_roots", "fill_trees"]

_MAX_THREADS = 8
NO_MASK = -1

Job = tuple[GrammarState, Sequence[int], Sequence[int]]
"""A state, the tokens of a tree's nodes, parents first (the root's stands in the answer already),
and the parents (the root's is -1)."""


def fill_next(state: GrammarState, row: Words) -> None:
    """Write what ``state`` allows next into ``row`` int32 [W], on the host."""
    if fill_trees([(state, [-1], [-1])], row[None]) == [[NO_MASK]]:
        row.fill(ALL_ALLOWED)


def fill_roots(states: Iterable[GrammarState], masks: Words) -> None:
    """Compute ahead what each state allows next: ``fill_trees`` then finds it in the matchers.

    Args:
        masks: int32 [R, W], a row for each state at least; what is written there has no use.
    """
    entries = [(state.matcher, row) for row, state in enumerate(states) if state.live]
    if entries:
        _executor().unsafe_compute_mask_ptr(entries, *_memory(masks))


def fill_trees(jobs: Sequence[Job], masks: Words) -> list[list[int]]:
    """Write what the grammars of n trees allow after their nodes into ``masks`` int32 [R, W], on
    the host, without gaps; R: as many as all trees have nodes.

    Returns:
        [n][T]: the row of each node's mask, the first ones of ``masks``. ``NO_MASK`` where any
        token is allowed: at a node that cannot be accepted, at an end token (nothing that follows
        is read), and in a tree whose grammar is finished or has failed (``GrammarState.error``).
    """
    words, width = masks.reshape(-1).data, masks.shape[1]
    walks = [_Walk(*job, words, width) for job in jobs]
    going, used = [walk for walk in walks if walk.state.live], 0
    while going := [walk for walk in going if walk.enter()]:
        bare, drafted = [], []
        for walk in going:
            walk.row, run = used, walk.run
            if run:
                drafted.append((walk.state.matcher, used, run))
            else:
                bare.append((walk.state.matcher, used))
            used += 1 + len(run)
        if drafted:
            _executor().unsafe_compute_mask_ptr_with_draft_token(drafted, *_memory(masks))
        if bare:
            _executor().unsafe_compute_mask_ptr(bare, *_memory(masks))
        for walk in going:
            walk.leave()
    return [walk.finish(masks) for walk in walks]


class _Walk:
    """A matcher on its way through one tree, run by run.

    Attributes:
        run: tokens of the present run after its first node. row: of the first node's mask.
    """

    def __init__(
        self,
        state: GrammarState,
        tokens: Sequence[int],
        parents: Sequence[int],
        words: memoryview,
        width: int,
    ) -> None:
        """``words`` int32 [R * W] of all masks; ``width``: W."""
        self.state, self._tokens, self._parents = state, tokens, parents
        self._words, self._width = words, width
        self._rows = [NO_MASK] * len(tokens)
        self._left = iter(_runs(tuple(parents)))
        self._nodes: Sequence[int] = ()
        self._num_entered = self._num_seen = self._num_forbidden = 0
        self.run: list[int] = []
        self.row = 0

    def enter(self) -> bool:
        """Let the matcher stand at the first node of the next run that can be accepted; False where
        there are no more.
        """
        tokens = self._tokens
        for above, nodes in self._left:
            if above and not self._reaches(nodes[0], self._rows[above[-1]]):
                continue
            run = [tokens[node] for node in nodes[1:]]
            ends = [i for i, token in enumerate(run) if self.state.is_end(token)]
            self.run = run[: ends[0]] if ends else run
            self._nodes, self._num_entered = nodes, len(above)
            if above:
                entering = [tokens[node] for node in (*above[1:], nodes[0])]
                self.state.matcher.consume_tokens(entering)
            return True
        return False

    def leave(self) -> None:
        """Note which nodes of the run have masks now, and undo ``enter``."""
        first, *others = self._nodes
        self._rows[first] = row = self.row
        for node in others:
            if not self._reaches(node, row):
                break
            row += 1
            self._rows[node] = row
        if self._num_entered:
            self.state.matcher.rollback(self._num_entered)

    def finish(self, masks: Words) -> list[int]:
        """The row of each node's mask, after the last run."""
        state = self.state
        if state.live and state.matcher.is_error():
            state.error = state.matcher.get_error()
        if not state.live:
            return [NO_MASK] * len(self._rows)
        state.end_tree(self._num_forbidden / self._num_seen if self._num_seen else None)
        if state.postpones_end:
            depths = [0]
            for node, row in enumerate(self._rows):
                if node:
                    depths.append(depths[self._parents[node]] + 1)
                if row != NO_MASK:
                    state.postpone_end(masks[row], depths[node])
        return self._rows

    def _reaches(self, node: int, above: int) -> bool:
        """Whether ``node`` can be accepted, and another token after it; ``above``: the row of its
        parent's mask.
        """
        if above == NO_MASK:
            return False
        token = self._tokens[node]
        self._num_seen += 1
        if not self._words[above * self._width + (token >> 5)] >> (token & 31) & 1:
            self._num_forbidden += 1
            return False
        return not self.state.is_end(token)


def _memory(masks: Words) -> tuple[int, int, int]:
    """Address, bytes of a row, rows."""
    return masks.ctypes.data, 4 * masks.shape[1], len(masks)


@lru_cache(maxsize=4096)
def _runs(parents: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Paths from the root to each leaf: the nodes that earlier ones have in common with it, and its
    own.
    """
    found, covered = [], set[int]()
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        path.reverse()
        new = next(i for i, node in enumerate(path) if node not in covered)
        found.append((tuple(path[:new]), tuple(path[new:])))
        covered.update(path)
    return found


@cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    # of a container's processors, not the machine's
    return LLExecutor(max(min(len(os.sched_getaffinity(0)) - 1, _MAX_THREADS), 1))
