"""Acceptance: acceptance rates by tree level: moving averages that decay to an optimistic prior."""

from __future__ import annotations

from collections.abc import Sequence

from trt_eagle3.decode.policy.candidate import Level

__all__ = ["Acceptance"]

_PRIOR_RATE = 0.7
"""Rate of a first token without observations: published EAGLE-3 drafts reach it."""
_PRIOR_WEIGHT = 4.0
"""Observations that the prior weighs: eight rejections in a row outweigh it."""
_WINDOW = 512.0
"""Observations in a moving average: a standard error of 0.02."""
_FADE = 5e-4
"""Share of the observations that decays per step. An unused level is tried again after about 2,000
steps. With one client that costs 0.3 % of the time (replay of the recorded loads)."""
_MOST = 0.98
"""Upper bound of any rate: no level is certain."""


class Acceptance:
    """Acceptance rate by level: P(the level holds the target's token | the levels above do)."""

    def __init__(self) -> None:
        self._accepted: dict[Level, float] = {}
        self._tried: dict[Level, float] = {}

    def observe(self, levels: Sequence[Level], accepted: Sequence[int]) -> None:
        """Count a step. ``accepted``: levels accepted, by sequence that drafted ``levels``."""
        for i, level in enumerate(levels):
            tried = sum(n >= i for n in accepted)
            keep = max(0.0, 1.0 - tried / _WINDOW)
            passed = sum(n > i for n in accepted)
            self._accepted[level] = keep * self._accepted.get(level, 0.0) + passed
            self._tried[level] = keep * self._tried.get(level, 0.0) + tried

    def fade(self, steps: int) -> None:
        """Decay all observations by ``steps`` steps."""
        keep = (1.0 - _FADE) ** steps
        for level in self._tried:
            self._accepted[level] *= keep
            self._tried[level] *= keep

    def tried(self, level: Level) -> float:
        """Return the decayed number of observations of ``level``."""
        return self._tried.get(level, 0.0)

    def rate(self, level: Level) -> float:
        """Return the rate of ``level``.

        An unobserved level takes the rate of the level above, or of another width at its depth.
        """
        return self._posterior(level, self._prior(level))

    def expected_tokens(self, levels: Sequence[Level]) -> float:
        """Return the expected tokens per tree of ``levels``, bonus token included."""
        total = reached = 1.0
        for level in levels:
            reached *= self.rate(level)
            total += reached
        return total

    def _posterior(self, level: Level, prior: float) -> float:
        accepted, tried = self._accepted.get(level, 0.0), self.tried(level)
        return min(_MOST, (accepted + _PRIOR_WEIGHT * prior) / (tried + _PRIOR_WEIGHT))

    def _prior(self, level: Level) -> float:
        depth, width = level
        above = _of_width(_PRIOR_RATE, 1, width) if depth == 1 else self.rate((depth - 1, width))
        others = [w for d, w in self._tried if d == depth and w != width]
        if not others:
            return above
        nearest = min(others, key=lambda w: abs(w - width))
        known = self._posterior((depth, nearest), _of_width(above, width, nearest))
        return _of_width(known, nearest, width)


def _of_width(rate: float, width: int, new_width: int) -> float:
    """Convert the ``rate`` of ``width`` siblings to that of ``new_width`` siblings.

    The odds of the r-th best token are assumed to fall as 1 / r^2.
    """
    missed = max(1.0 - rate, 1.0 - _MOST)
    return float(1.0 - missed ** (_odds(new_width) / _odds(width)))


def _odds(width: int) -> float:
    return sum(1.0 / rank**2 for rank in range(1, width + 1))
