"""How often the draft is right: acceptance by level of a tree, decayed counts over a prior."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from trt_eagle3.decode.dynamic_tree import DynamicTree
from trt_eagle3.decode.sequence import SequenceState
from trt_eagle3.decode.tree import Tree

__all__ = ["AcceptanceRates", "Level", "SequenceRates", "levels_of"]

Level = tuple[int, int]
"""Depth, from 1 on, and siblings on the likeliest path there."""

_FIRST = 0.7  # of a first token, where nothing is known (as ``tree.best_first_paths``)
_MOST = 0.98  # of any level: nothing is certain
_PRIOR = 8.0  # observations that a prior stands for
_ASSUMED = 3.0  # that a rate stands for which nobody measured
_DOUBT = 2.0  # failures that a rate on the safe side counts besides, successes one on the other
_WINDOW = 1000.0  # observations of a level that count
_OWN_WINDOW = 32.0  # of one sequence
_NEW = 16  # observations of a level up to which it is hardly known
_SLOTS = 512


def levels_of(tree: Tree | DynamicTree | None) -> tuple[Level, ...]:
    """The levels of a tree; none of plain decoding.

    A dynamic tree chooses its siblings as it grows: its nodes are counted as if spread evenly.
    """
    if tree is None:
        return ()
    if isinstance(tree, DynamicTree):
        width = max(1, min(tree.topk, round((tree.num_nodes - 1) / tree.steps)))
        return tuple((depth, width) for depth in range(1, tree.steps + 1))
    found, parent = list[Level](), 0
    for depth in range(1, tree.steps + 1):
        siblings = [i for i, above in enumerate(tree.parents) if above == parent]
        if not siblings:
            break
        found.append((depth, len(siblings)))
        parent = min(siblings, key=lambda i: tree.ranks[i])
    return tuple(found)


class AcceptanceRates:
    """Of all sequences: the share of cycles whose level held the target's token, of those that
    came so far.
    """

    def __init__(self, prior: Mapping[Level, float]) -> None:
        """``prior``: rates of levels that are known from elsewhere."""
        self._prior = prior
        self._counts: dict[Level, tuple[float, float]] = {}  # accepted, tried

    def observe(self, levels: Sequence[Level], accepted: Sequence[int]) -> None:
        """Cycles of as many sequences accepted the first ``accepted`` of ``levels``."""
        for i, level in enumerate(levels):
            came = sum(n >= i for n in accepted)
            keep = (1.0 - 1.0 / _WINDOW) ** came
            hits, tried = self._counts.get(level, (0.0, 0.0))
            passed = sum(n > i for n in accepted)
            self._counts[level] = keep * hits + passed, keep * tried + came

    def fade(self, share: float) -> None:
        """Forget ``share`` of what was observed: time goes by without observations."""
        keep = 1.0 - share
        self._counts = {level: (keep * a, keep * b) for level, (a, b) in self._counts.items()}

    def tried(self, level: Level) -> float:
        """Observations of ``level`` that still count."""
        return self._counts.get(level, (0.0, 0.0))[1]

    def is_new(self, level: Level) -> bool:
        """Whether next to nothing was seen of ``level``."""
        return self.tried(level) < _NEW

    def rate(self, level: Level) -> float:
        """How often ``level`` holds the target's token, given that the levels above did."""
        return self._posterior(level, self._expected(level))

    def expected_tokens(self, levels: Sequence[Level]) -> float:
        """Mean tokens of a cycle over a tree of ``levels``, the bonus token included."""
        total = reached = 1.0
        for level in levels:
            reached *= self.rate(level)
            total += reached
        return total

    def least_tokens(self, levels: Sequence[Level]) -> float:
        """The same on the safe side: what was not seen to be accepted is not."""
        total = reached = 1.0
        for level in levels:
            accepted, tried = self._counts.get(level, (0.0, 0.0))
            if level in self._prior:
                accepted, tried = accepted + _PRIOR * self._prior[level], tried + _PRIOR
            reached *= min(_MOST, accepted / (tried + _DOUBT))
            total += reached
        return total

    def most_tokens(self, levels: Sequence[Level]) -> float:
        """The same on the other side: what was seen but seldom may be accepted more often."""
        total = reached = 1.0
        for level in levels:
            _, tried = self._counts.get(level, (0.0, 0.0))
            known = tried + (_PRIOR if level in self._prior else _ASSUMED)
            reached *= min(_MOST, (self.rate(level) * known + _DOUBT) / (known + _DOUBT))
            total += reached
        return total

    def _posterior(self, level: Level, prior: float) -> float:
        accepted, tried = self._counts.get(level, (0.0, 0.0))
        weight = _PRIOR if level in self._prior else _ASSUMED
        return min(_MOST, (accepted + weight * prior) / (tried + weight))

    def _expected(self, level: Level) -> float:
        """The prior's rate; where it has none, what other widths of this depth say, or the level
        above.
        """
        depth, width = level
        observed = [w for d, w in self._counts if d == depth and w != width]
        if level in self._prior or not observed:
            return self._unobserved(level)
        nearest = min(observed, key=lambda w: abs(w - width))
        known = self._posterior((depth, nearest), self._unobserved((depth, nearest)))
        return _of_width(known, nearest, width)

    def _unobserved(self, level: Level) -> float:
        """As ``_expected``, with nothing observed at this depth."""
        depth, width = level
        known = [w for d, w in self._prior if d == depth]
        if known:
            nearest = min(known, key=lambda w: abs(w - width))
            return _of_width(self._prior[depth, nearest], nearest, width)
        return self.rate((depth - 1, width)) if depth > 1 else _of_width(_FIRST, 1, width)


class SequenceRates:
    """The same of each sequence by itself, over what all do."""

    def __init__(self, levels: Sequence[Level]) -> None:
        """``levels``: all that any tree has."""
        self._columns = {level: i for i, level in enumerate(levels)}
        self._slots: WeakKeyDictionary[SequenceState, int] = WeakKeyDictionary()
        self._counts = self._room(0)

    def observe(
        self, levels: Sequence[Level], sequences: Sequence[SequenceState], accepted: Sequence[int]
    ) -> None:
        """A cycle of ``sequences`` accepted the first ``accepted`` of ``levels``."""
        rows = self._rows(sequences)[:, None]
        columns = np.array([self._columns[level] for level in levels])
        depth, came = np.arange(len(levels)), np.array(accepted)[:, None]
        old = self._counts[:, rows, columns]
        new = (1.0 - 1.0 / _OWN_WINDOW) * old + np.stack([depth < came, depth <= came])
        self._counts[:, rows, columns] = np.where(depth <= came, new, old)

    def expected_tokens(
        self,
        trees: Sequence[Sequence[Level]],
        sequences: Sequence[SequenceState],
        overall: AcceptanceRates,
    ) -> list[float]:
        """Mean tokens of a cycle of all ``sequences`` together, bonus tokens included, by tree
        (its levels).
        """
        prior = np.array([overall.rate(level) for level in self._columns])
        accepted, tried = self._counts[:, self._rows(sequences)]
        rates = np.minimum((accepted + _PRIOR * prior) / (tried + _PRIOR), _MOST)
        found = []
        for levels in trees:
            of_tree = rates[:, [self._columns[level] for level in levels]]
            found.append(float(len(sequences) + of_tree.cumprod(axis=1).sum()))
        return found

    def _rows(self, sequences: Sequence[SequenceState]) -> NDArray[np.int64]:
        """int64 [B]: where the counts of ``sequences`` stand."""
        found = [self._slots.get(s, -1) for s in sequences]
        if -1 in found:
            for i in [i for i, slot in enumerate(found) if slot < 0]:
                self._slots[sequences[i]] = self._free_slot()
            found = [self._slots[s] for s in sequences]
        return np.array(found, dtype=np.int64)

    def _free_slot(self) -> int:
        """The next one, after those that are left have moved together where all are taken."""
        if self._used == self._counts.shape[1]:
            left = list(self._slots.items())
            old = self._counts[:, [slot for _, slot in left]]
            self._counts = self._room(len(left))
            self._counts[:, : len(left)] = old
            for i, (sequence, _) in enumerate(left):
                self._slots[sequence] = i
        self._used += 1
        return self._used - 1

    def _room(self, used: int) -> NDArray[np.float64]:
        """Accepted and tried float64 [2, slots, levels] of nobody yet."""
        self._used = used
        return np.zeros((2, max(_SLOTS, 2 * used), len(self._columns)))


def _of_width(rate: float, width: int, wanted: int) -> float:
    """The rate of ``wanted`` siblings where ``width`` have ``rate``: the odds of the r-th best
    token fall as 1 / r ** 2.
    """
    if width == wanted:
        return rate
    missed = max(1.0 - rate, 1.0 - _MOST)
    return float(1.0 - missed ** (_odds(wanted) / _odds(width)))


def _odds(width: int) -> float:
    return sum(1.0 / rank**2 for rank in range(1, width + 1))
