"""Staged search: one factor at a time, then pairs of the best, repeated around each better
interpretation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from torch import Tensor

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.errors import UserError
from trt_eagle3.probe.interpretation import Interpretation, alternatives
from trt_eagle3.probe.score import Score, Scorer
from trt_eagle3.spec import TargetSpec

__all__ = ["Contrast", "SearchResult", "Standing", "contrast", "search"]

Standing = Literal["better", "worse", "unclear", "no difference"]

# A difference counts from four standard errors over answer tokens on. Two dozen interpretations are
# as many chances to err, and tokens of one answer depend on each other. If each counted only half,
# 4 sigma would still be 2.8.
_SIGMAS = 4.0
# A difference below this share of the draft's divergence does not count: no acceptance would show
# it.
_MIN_GAIN = 0.01
# float32 noise on one token's cross-entropy. Interpretations that must agree (1-D rope from row 0
# or 1, over text) differed by 1e-6 at most on the tiny pair. Of those that need not agree, the
# nearest differed by 3e-4 (chunked sections over images).
_SAME = 1e-4
_PAIRED = 3  # number of factors whose best interpretations are tried in pairs
_MAX_ROUNDS = 6


@dataclass(frozen=True)
class Contrast:
    """Comparison of two interpretations, paired by answer token.

    Attributes:
        difference: of the mean cross-entropy, nats; negative is better.
        standard_error: of the difference.
    """

    difference: float
    standard_error: float
    standing: Standing


@dataclass(frozen=True)
class SearchResult:
    """Outcome of a search: the scores of all interpretations, and the best without needless
    changes.
    """

    best: Interpretation
    scores: dict[Interpretation, Score]


def contrast(score: Score, other: Score) -> Contrast:
    """Compare ``score`` with ``other``, by the paired t statistic or Wilcoxon's signed ranks.

    The ranks help with good drafts: a few tokens dominate their cross-entropy, so its mean is
    uncertain.
    """
    differences = score.token_ce - other.token_ce
    mean, error = float(differences.mean()), float(differences.std() / len(differences) ** 0.5)
    ranked = _signed_ranks(differences)
    if float(differences.abs().max()) < _SAME:
        return Contrast(mean, error, "no difference")
    significant = abs(mean) > _SIGMAS * error or (abs(ranked) > _SIGMAS and ranked * mean > 0)
    if not significant or abs(mean) < _MIN_GAIN * min(score.divergence, other.divergence):
        return Contrast(mean, error, "unclear")
    return Contrast(mean, error, "better" if mean < 0 else "worse")


def _signed_ranks(differences: Tensor) -> float:
    """Wilcoxon's signed-rank statistic in standard deviations."""
    n = len(differences)
    ranks = differences.abs().argsort().argsort().double() + 1
    return float((ranks * differences.sign()).sum()) / math.sqrt(n * (n + 1) * (2 * n + 1) / 6)


def search(
    scorer: Scorer,
    manifest: DraftManifest,
    spec: TargetSpec,
    progress: Callable[[int, int], object] = lambda *_: None,
) -> SearchResult:
    """Find the interpretation of ``manifest`` that fits best.

    Args:
        progress: called with the number of scored interpretations and the number to score so far.
    Raises:
        UserError: the manifest in use has no finite score.
    """
    return _Search(scorer, manifest, spec, progress).run()


class _Search:
    def __init__(
        self,
        scorer: Scorer,
        manifest: DraftManifest,
        spec: TargetSpec,
        progress: Callable[[int, int], object],
    ) -> None:
        self._scorer, self._manifest, self._progress = scorer, manifest, progress
        self._factors = alternatives(manifest, spec)
        self._scores: dict[Interpretation, Score] = {}
        self._total = 1

    def run(self) -> SearchResult:
        centre = Interpretation()
        if not math.isfinite(self._ce(centre)):
            raise UserError(
                "draft: its logits are not finite, so nothing can be compared. Look for NaN or "
                "infinity in its weights, or build with dtype float32."
            )
        for _ in range(_MAX_ROUNDS):
            best = self._round(centre)
            if best is None:
                break
            centre = best
        return SearchResult(self._prune(centre), self._scores)

    def _round(self, centre: Interpretation) -> Interpretation | None:
        """Return the best of the clearly better interpretations near ``centre``.

        A pair must be better than its parts.
        """
        firsts = list(self._best_of_factors(centre))[:_PAIRED]
        found = firsts[0] if firsts and self._better(firsts[0], centre) else None
        pairs = []
        for a, b in combinations(firsts, 2):
            pair = a.changed(dict(b.changes), self._manifest)
            if len(pair.changes) > max(len(a.changes), len(b.changes)):
                pairs.append(pair)
        self._want(pairs)
        for pair in sorted(pairs, key=self._ce):
            if self._better(pair, found or centre):
                return pair
        return found

    def _best_of_factors(self, centre: Interpretation) -> Iterator[Interpretation]:
        """Yield each factor's best other value at ``centre``, the best factor first.

        Values without a difference are skipped.
        """
        interpretations = {
            name: [
                r for change in changes if (r := centre.changed(change, self._manifest)) != centre
            ]
            for name, changes in self._factors.items()
        }
        self._want([r for several in interpretations.values() for r in several])
        bests = [min(several, key=self._ce) for several in interpretations.values() if several]
        for interpretation in sorted(bests, key=self._ce):
            if (
                contrast(self._score(interpretation), self._score(centre)).standing
                != "no difference"
            ):
                yield interpretation

    def _prune(self, interpretation: Interpretation) -> Interpretation:
        """Undo each change without which the draft does as well, factor by factor."""
        for fields in _groups(interpretation):
            simpler = interpretation.without(fields)
            if not self._better(interpretation, simpler):
                interpretation = simpler
        return interpretation

    def _want(self, interpretations: list[Interpretation]) -> None:
        """Score interpretations; the progress total includes them from the start."""
        new = [r for r in dict.fromkeys(interpretations) if r not in self._scores]
        self._total = len(self._scores) + len(new)
        for interpretation in new:
            self._score(interpretation)

    def _score(self, interpretation: Interpretation) -> Score:
        if interpretation not in self._scores:
            self._scores[interpretation] = self._scorer.score(interpretation.apply(self._manifest))
            self._progress(len(self._scores), max(self._total, len(self._scores)))
        return self._scores[interpretation]

    def _ce(self, interpretation: Interpretation) -> float:
        return self._score(interpretation).cross_entropy

    def _better(self, interpretation: Interpretation, other: Interpretation) -> bool:
        return contrast(self._score(interpretation), self._score(other)).standing == "better"


_LINKED = (
    frozenset({"image_rows", "image_rows_rotated"}),
    frozenset({"rope.kind", "rope.base"}),
    frozenset({"shift", "anchor_row"}),
)


def _groups(interpretation: Interpretation) -> list[frozenset[str]]:
    """Group the changed fields; fields that have no meaning alone form one group.

    For example, three position axes need a rope layout that assigns frequencies to them.
    """
    changed = frozenset(field for field, _ in interpretation.changes)
    layout = frozenset(
        {"rope.layout", "rope.sections", "positions"} if "rope.layout" in changed else ()
    )
    linked = (*_LINKED, layout)
    alone = changed.difference(*linked)
    return [g for group in linked if (g := group & changed)] + [
        frozenset({f}) for f in sorted(alone)
    ]
