"""Host cost of masks of drafted trees: ``python -m benchmarks.grammar_host``.

Uses the states of ``benchmarks.grammar``, and trees of which a grammar allows some nodes. Prints
medians of the process' CPU time, which other work on the machine affects less than wall time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.grammar import (
    batches_option,
    nodes_option,
    state_maker,
    steps_option,
    tree_of,
    vocabulary_option,
)
from trt_eagle3.decode.sampling.grammar_masks import NO_MASK, fill_next, fill_roots, fill_trees
from trt_eagle3.decode.sampling.grammar_state import GrammarState, Words
from trt_eagle3.decode.speculation.tree import Tree
from trt_eagle3.io.run_command import run_command

__all__ = ["DraftedTrees", "allowed_tokens", "main"]

_VOCABULARY = 151_936
_MOST = 2000  # first allowed tokens that are drawn from


@click.command()
@batches_option
@click.option("--mode", type=click.Choice(["chain", "tree"]), default="tree", show_default=True)
@steps_option
@nodes_option
@click.option("--cycles", default=10, show_default=True, help="Trees per median.")
@vocabulary_option
def main(
    batches: tuple[int, ...],
    mode: str,
    steps: int,
    nodes: int,
    cycles: int,
    vocabulary: Path | None,
) -> None:
    """Print milliseconds of masks by batch size and share of allowed drafts."""
    make, tree = state_maker(_VOCABULARY, vocabulary), tree_of(mode, steps, nodes)
    assert isinstance(tree, Tree)
    table = Table("batch", "allowed", "masks", "roots ms", "trees ms")
    for batch in batches:
        for share in (0.0, 0.8, 1.0):
            counts, *seconds = DraftedTrees(make, tree.parents, batch, share).measure(cycles)
            ms = (f"{1e3 * value:.2f}" for value in seconds)
            table.add_row(str(batch), f"{share:.0%}", f"{counts:.0f}", *ms)
    Console(width=60).print(table)


class DraftedTrees:
    """Trees of a batch of answers, which continue with tokens that their grammar allows."""

    def __init__(
        self, make: Callable[[], GrammarState], parents: Sequence[int], batch: int, share: float
    ) -> None:
        """``share``: probability that a node's token is drawn from its parent's allowed tokens."""
        self._states = [make() for _ in range(batch)]
        # separate states of the same answers: drawing caches masks in their matchers
        self._others = [make() for _ in range(batch)]
        self._parents, self._share = parents, share
        self._chance = random.Random(0)
        self._size = self._states[0].vocab_size
        self._words = -(-self._size // 32)

    def measure(self, cycles: int) -> tuple[float, float, float]:
        """Return medians of ``cycles``: number of masks, CPU seconds of root and of tree masks."""
        masks = np.empty((len(self._states) * len(self._parents), self._words), dtype=np.int32)
        counts, roots, trees = [], [], []
        for _ in range(cycles):
            drafts = [self._draft(state) for state in self._others]
            jobs = [(s, t, self._parents) for s, t in zip(self._states, drafts, strict=True)]
            start = time.process_time()
            fill_roots(self._states, masks)
            then = time.process_time()
            found = fill_trees(jobs, masks)
            trees.append(time.process_time() - then)
            roots.append(then - start)
            counts.append(sum(row != NO_MASK for rows in found for row in rows))
            self._advance([masks[rows[0]] for rows in found])
        return median(counts), median(roots), median(trees)

    def _advance(self, allowed: Sequence[Words]) -> None:
        for state, other, row in zip(self._states, self._others, allowed, strict=True):
            token = self._drawn(row)
            state.advance([token])
            other.advance([token])

    def _draft(self, root: GrammarState) -> list[int]:
        states: list[GrammarState | None] = [root]
        tokens, row = [-1], np.empty(self._words, dtype=np.int32)
        for parent in self._parents[1:]:
            state, token = states[parent], self._chance.randrange(self._size)
            if state is not None and self._chance.random() < self._share:
                fill_next(state, row)
                token = self._drawn(row)
            tokens.append(token)
            states.append(state.after(token) if state is not None else None)
        return tokens

    def _drawn(self, row: Words) -> int:
        return int(self._chance.choice(allowed_tokens(row)[:_MOST]))


def allowed_tokens(row: Words) -> NDArray[np.int64]:
    """Return the ids of the tokens whose bits a mask sets, int64 [A]."""
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


if __name__ == "__main__":
    run_command(main)
