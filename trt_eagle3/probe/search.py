"""The staged search: one factor at a time, then pairs of the best, again around each better
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

__all__ = ["Contrast", "Found", "Standing", "contrast", "search"]

Standing = Literal["better", "worse", "unclear", "no difference"]

# A difference counts from four standard errors over answer tokens on. Two dozen interpretations are
# as many chances to err,
# and tokens of one answer depend on each other: were each worth only half a one, 4 sigma would
# still be 2.8.
_SIGMAS = 4.0
# Nor does one count that is less than this share of the draft's divergence: no acceptance would
# show it.
_MIN_GAIN = 0.01
# float32 noise on one token's cross-entropy. Interpretations that must agree (1-D rope from row 0
# or 1, over text) differed by 1e-6 at most on the tiny pair; of those that need not agree, the
# nearest by 3e-4 (chunked sections over images).
_SAME = 1e-4
_PAIRED = 3  # factors whose best interpretations are tried in pairs
_MAX_ROUNDS = 6


@dataclass(frozen=True)
class Contrast:
    """An interpretation against another, paired by answer token.

    Attributes:
        difference: in mean cross-entropy, nats; negative is better. standard_error: of that.
    """

    difference: float
    standard_error: float
    standing: Standing


@dataclass(frozen=True)
class Found:
    """Outcome of a search: every interpretation that was scored, and the best, which changes
    nothing needlessly.
    """

    best: Interpretation
    scores: dict[Interpretation, Score]


def contrast(score: Score, other: Score) -> Contrast:
    """How ``score`` stands against ``other``, by the paired t statistic, or by Wilcoxon's signed
    ranks.

    The ranks are there for good drafts: their cross-entropy lies in a few tokens, which is what
    makes a mean unsure.
    """
    differences = score.token_ce - other.token_ce
    mean, error = float(differences.mean()), float(differences.std() / len(differences) ** 0.5)
    ranked = _signed_ranks(differences)
    if float(differences.abs().max()) < _SAME:
        return Contrast(mean, error, "no difference")
    sure = abs(mean) > _SIGMAS * error or (abs(ranked) > _SIGMAS and ranked * mean > 0)
    if not sure or abs(mean) < _MIN_GAIN * min(score.divergence, other.divergence):
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
) -> Found:
    """Find the interpretation of ``manifest`` that fits best.

    Args:
        progress: called with interpretations scored and interpretations known to be wanted so far.
    Raises:
        UserError: the manifest as it is gives no finite score.
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

    def run(self) -> Found:
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
        return Found(self._prune(centre), self._scores)

    def _round(self, centre: Interpretation) -> Interpretation | None:
        """The best interpretation near ``centre``, of those that are clearly better; a pair must
        better its parts.
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
        """Each factor's best other value at ``centre``, the best factor first; none that makes
        no difference.
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
        """Take back, factor by factor, each change without which the draft does as well."""
        for fields in _groups(interpretation):
            plainer = interpretation.without(fields)
            if not self._better(interpretation, plainer):
                interpretation = plainer
        return interpretation

    def _want(self, interpretations: list[Interpretation]) -> None:
        """Score interpretations; the progress knows beforehand how many."""
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


_TOGETHER = (
    frozenset({"image_rows", "image_rows_rotated"}),
    frozenset({"rope.kind", "rope.base"}),
)


def _groups(interpretation: Interpretation) -> list[frozenset[str]]:
    """The changed fields, those together that mean nothing alone: three axes need a rope that is
    dealt to them.
    """
    changed = frozenset(field for field, _ in interpretation.changes)
    layout = frozenset(
        {"rope.layout", "rope.sections", "positions"} if "rope.layout" in changed else ()
    )
    together = (*_TOGETHER, layout)
    alone = changed.difference(*together)
    return [g for group in together if (g := group & changed)] + [
        frozenset({f}) for f in sorted(alone)
    ]
