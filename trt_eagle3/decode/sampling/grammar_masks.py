"""Grammar masks of drafted trees: the tokens allowed at every node, computed by llguidance.

llguidance's own threads compute the masks of a run of tokens in one call, without Python's lock.
They write into memory that the device copies from. A chain is one run. A tree has several runs: its
first path from the root to a leaf, then the new nodes of each other path. The first runs of all
trees are computed in one batch, then the second runs, and so on. Only nodes that can be accepted
have a mask.

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
"""A state, the tokens of a tree's nodes, and their parents (the root's is -1). Parents come first.
The answer already contains the root's token."""


def fill_next(state: GrammarState, row: Words) -> None:
    """Write the tokens that ``state`` allows next into ``row`` int32 [W], on the host."""
    if fill_trees([(state, [-1], [-1])], row[None]) == [[NO_MASK]]:
        row.fill(ALL_ALLOWED)


def fill_roots(states: Iterable[GrammarState], masks: Words) -> None:
    """Compute ahead what each state allows next. The matchers cache it for ``fill_trees``.

    Args:
        masks: int32 [R, W], at least one row per state; used as scratch memory.
    """
    entries = [(state.matcher, row) for row, state in enumerate(states) if state.live]
    if entries:
        _executor().unsafe_compute_mask_ptr(entries, *_memory(masks))


def fill_trees(jobs: Sequence[Job], masks: Words) -> list[list[int]]:
    """Write the masks of n trees into ``masks`` int32 [R, W], on the host.

    Masks fill the first rows without gaps. R: at least the number of nodes of all trees.

    Returns:
        [n][T]: the row of each node's mask. ``NO_MASK`` if any token is allowed: at a node that
        cannot be accepted, at an end token (later tokens are not used), and in a tree whose grammar
        is finished or has failed (``GrammarState.error``).
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
    """A walk of a matcher through one tree, run by run.

    Attributes:
        run: tokens of the current run after its first node. row: row of the first node's mask.
    """

    def __init__(
        self,
        state: GrammarState,
        tokens: Sequence[int],
        parents: Sequence[int],
        words: memoryview,
        width: int,
    ) -> None:
        """Create a walk. ``words``: int32 [R * W] of all masks. ``width``: W."""
        self.state, self._tokens, self._parents = state, tokens, parents
        self._words, self._width = words, width
        self._rows = [NO_MASK] * len(tokens)
        self._left = iter(_runs(tuple(parents)))
        self._nodes: Sequence[int] = ()
        self._num_entered = self._num_seen = self._num_forbidden = 0
        self.run: list[int] = []
        self.row = 0

    def enter(self) -> bool:
        """Advance the matcher to the first node of the next run that can be accepted.

        Returns False if there is no such run.
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
        """Store the mask rows of the run's nodes, and roll the matcher back to the root."""
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
        """Return the row of each node's mask, after the last run."""
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
        """Return whether ``node`` can be accepted and does not end the answer.

        ``above``: the row of its parent's mask.
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
    """Return address, bytes per row, and number of rows."""
    return masks.ctypes.data, 4 * masks.shape[1], len(masks)


@lru_cache(maxsize=4096)
def _runs(parents: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the path from the root to each leaf, in two parts.

    First the nodes that it shares with earlier paths, then its new nodes.
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

    # counts the container's processors, not the machine's
    return LLExecutor(max(min(len(os.sched_getaffinity(0)) - 1, _MAX_THREADS), 1))
