"""Every tolerance of every check: a name, a value per dtype, and the origin of the value."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trt_eagle3.errors import UserError, clip, quote
from trt_eagle3.io.yaml_file import read_yaml

__all__ = [
    "MOST_NATS",
    "MOST_ROUNDING",
    "P95",
    "ROUNDING",
    "THRESHOLDS",
    "WORST_ROW",
    "Limit",
    "Override",
    "Threshold",
    "Thresholds",
    "read_overrides",
]

P95 = "p95, or a quarter of the worst"
WORST_ROW = 4
"""How many times the tolerance of the other rows the worst row may have: ``P95``.

The worst rows of sound engines stay within the tolerance itself (at most 0.7 of it, over all checks
and dtypes, measured as the tolerances are). A row that was swapped with another has an error of
about 1.4.
"""

ROUNDING = 3
"""Allowed multiple of PyTorch's error in the engine's dtype, for a tensor outside its tolerance.

Both sides may have that error; kernels that sum in another order may add half of it.
"""
MOST_ROUNDING = 0.35
"""Largest error that ``ROUNDING`` may allow: a quarter of the error of a swapped row."""
MOST_NATS = 3.0
"""The same for log-probabilities: those of another node differ by more."""

Better = Literal["low", "high"]


@dataclass(frozen=True)
class Threshold:
    """A tolerance.

    Attributes:
        metric: what is measured.
        better: ``low`` = must not exceed the value, ``high`` = must not fall below it.
        values: dtype of the engine -> value.
        origin: the reason for the value.
        logarithmic: measure the distance to a tolerance in powers of ten, for p-values.
    """

    metric: str
    better: Better
    values: Mapping[str, float]
    origin: str
    logarithmic: bool = False


def _same(value: float) -> dict[str, float]:
    return dict.fromkeys(("float32", "float16", "bfloat16"), value)


_EXACT = "no operation between the two may round"
_MEASURED = (
    "at least twice the worst measured of sound engines, random pairs and the tiny pair with the "
    "quick suite, against a float32 reference (docs/validate.md, Tolerances)"
)

THRESHOLDS: Mapping[str, Threshold] = {
    "exact": Threshold("largest difference", "low", _same(0.0), _EXACT),
    "made_weights": Threshold(
        "relative L2 error of a row, worst",
        "low",
        _same(0.3),
        "INT4 in groups of 128 has an error of 0.1 of a row, 0.2 where a group is nearly empty; a "
        "misplaced scale or number has an error of about 1",
    ),
    "pixel_values": Threshold(
        "largest difference",
        "low",
        _same(1e-6),
        "images are equal; for videos transformers folds the rescaling into mean and std, which "
        "changes the last bit (6e-8 measured); one level of 255 would be 8e-3",
    ),
    "vision": Threshold(
        f"relative L2 error of a row, {P95}",
        "low",
        {"float32": 2e-5, "float16": 1.5e-2, "bfloat16": 1e-1},
        _MEASURED,
    ),
    "layer_output": Threshold(
        f"relative L2 error of a row, {P95}",
        "low",
        {"float32": 5e-5, "float16": 1.5e-2, "bfloat16": 1.5e-1},
        f"{_MEASURED}; includes the errors of all earlier layers",
    ),
    "layer_step": Threshold(
        "relative L2 error of a row, worst",
        "low",
        {"float32": 2e-5, "float16": 1e-2, "bfloat16": 7e-2},
        f"{_MEASURED}; one layer alone, from the engine's own input",
    ),
    "kv_attention": Threshold(
        "relative L2 error of a row, worst",
        "low",
        {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2},
        "attention alone, over the numbers in the cache: 8 times the error that the kernels' tests "
        "allow a launch; a misplaced scale has an error of about 1",
    ),
    "aux": Threshold(
        f"relative L2 error of a row, {P95}",
        "low",
        {"float32": 5e-5, "float16": 1.5e-2, "bfloat16": 1.5e-1},
        "as layer_output: they are layer outputs",
    ),
    "logits_cosine": Threshold(
        "cosine of a row of logits, p5",
        "high",
        {"float32": 0.9999999, "float16": 0.9998, "bfloat16": 0.99},
        _MEASURED,
    ),
    "logits_l2": Threshold(
        f"relative L2 error of a row of logits, {P95}",
        "low",
        {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1.6e-1},
        _MEASURED,
    ),
    "top1": Threshold(
        "rows whose best token is the reference's, of those with a margin above 0.1 in "
        "probability that are no ties",
        "high",
        {"float32": 1.0, "float16": 1.0, "bfloat16": 0.99},
        "neither rounding (tie_margin) nor a nearly equal probability can change the best token of "
        "such a row",
    ),
    "top5": Threshold(
        "rows whose best token is among the reference's best five, of the remaining rows",
        "high",
        {"float32": 1.0, "float16": 1.0, "bfloat16": 0.98},
        "near-ties of two tokens stay inside the best five",
    ),
    "tie_margin": Threshold(
        "difference of logits by which the reference prefers its token, over the root mean square "
        "of the row's logits",
        "low",
        {"float32": 2e-5, "float16": 3e-2, "bfloat16": 3e-1},
        "4 times the worst relative L2 error of logits measured on sound engines: the error of a "
        "difference of two logits, at three standard deviations",
    ),
    "drawn_tie": Threshold(
        "probability of all likelier tokens, of drawn tokens that differ",
        "low",
        {"float32": 0.0, "float16": 0.9999, "bfloat16": 0.9999},
        "the random numbers of a seed belong to a tree, and a draft that rounds differently drafts "
        "another tree: both tokens are then independent draws, and one in ten thousand lies so "
        "deep in the tail. In float32 drafts are equal, and no mismatch is a tie",
    ),
    "seed_draws": Threshold(
        "share of a seed's draws at temperature 5 that differ when drawn again",
        "low",
        {"float32": 0.0, "float16": 0.5, "bfloat16": 0.5},
        "nine of ten draws of an ignored seed (measured on a trained pair, whose model is "
        "confident), one of fifteen where rounding by 2 % changes the drafted trees",
    ),
    "token_failures": Threshold(
        "mismatches that are no ties", "low", _same(0.0), "greedy decoding is deterministic"
    ),
    "logprobs": Threshold(
        "largest difference, nats",
        "low",
        {"float32": 1e-3, "float16": 1e-1, "bfloat16": 1.0},
        "the error of a logit at six standard deviations, by the relative error of logits; the "
        "distribution of another node or of the draft differs by several nats",
    ),
    "draft_features": Threshold(
        "relative L2 error of a row, worst",
        "low",
        {"float32": 2e-5, "float16": 3e-3, "bfloat16": 2e-2},
        _MEASURED,
    ),
    "draft_steps": Threshold(
        f"relative L2 error of a row, {P95}",
        "low",
        {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-1},
        f"{_MEASURED}; four steps on the draft's own features",
    ),
    "acceptance": Threshold(
        "largest difference of the share accepted at a position",
        "low",
        {"float32": 0.0, "float16": 0.02, "bfloat16": 0.05},
        "equal proposals are accepted equally; below float32 a few near-ties of the draft resolve "
        "differently, and one cycle is not counted",
    ),
    "sampling_probabilities": Threshold(
        "largest difference of a probability",
        "low",
        _same(1e-5),
        "float32 softmax over the same logits, summed in another order; 1e-7 measured",
    ),
    "sampling_frequencies": Threshold(
        "p-value, the least of all",
        "high",
        _same(1e-6),
        "seeded, so equal in every run; a correct sampler falls below it for one in a million "
        "seeds",
        logarithmic=True,
    ),
}
"""Name -> tolerance. ``--thresholds FILE`` overrides values by these names."""


@dataclass(frozen=True)
class Override:
    """A tolerance that the user set in place of the default."""

    name: str
    ours: float
    used: float


@dataclass(frozen=True)
class Limit:
    """A tolerance as it applies to one run."""

    name: str
    metric: str
    better: Better
    value: float
    origin: str
    overridden: bool
    logarithmic: bool = False

    def holds(self, value: float) -> bool:
        """Return whether ``value`` is within the tolerance; NaN never is."""
        return value <= self.value if self.better == "low" else value >= self.value

    def used(self, value: float) -> float | None:
        """Return the share of the tolerance that ``value`` uses: 0 is perfect, above 1 fails.

        None if nothing may differ, or if everything may.
        """
        room, gone = self._distance(self.value), self._distance(value)
        if room <= 0 or math.isinf(room):
            return None
        return max(gone, 0.0) / room

    def _distance(self, value: float) -> float:
        """Return the distance from the perfect value: 0, or 1 if high is better."""
        if self.better == "low":
            return value
        if self.logarithmic:
            return -math.log(value) if value > 0 else math.inf
        return 1 - value


class Thresholds:
    """The tolerances of one dtype, with the user's overrides.

    ``own``: threshold name -> a dtype that replaces the engine's for that threshold.
    """

    def __init__(
        self,
        dtype: str,
        overrides: Mapping[str, float] | None = None,
        own: Mapping[str, str] | None = None,
    ) -> None:
        self._dtype, self._overrides, self._own = dtype, dict(overrides or {}), own or {}

    def __getitem__(self, name: str) -> Limit:
        known = THRESHOLDS[name]
        ours = known.values[self._dtype_of(name)]
        value = self._overrides.get(name, ours)
        origin = (
            f"set by the user; ours is {ours:g}: {known.origin}"
            if name in self._overrides
            else known.origin
        )
        overridden = name in self._overrides
        return Limit(name, known.metric, known.better, value, origin, overridden, known.logarithmic)

    def _dtype_of(self, name: str) -> str:
        return self._own.get(name, self._dtype)

    @property
    def overrides(self) -> list[Override]:
        """The tolerances that the user changed."""
        return [
            Override(name, THRESHOLDS[name].values[self._dtype_of(name)], v)
            for name, v in self._overrides.items()
        ]


def read_overrides(file: Path) -> dict[str, float]:
    """Read a YAML mapping of threshold names to numbers.

    Raises:
        UserError: the file is unreadable, is no such mapping, or has an unknown name (the message
            gives the nearest).
    """
    try:
        values = read_yaml(file)
    except OSError as error:
        raise UserError(f"{file}: cannot read the thresholds: {error.strerror}") from error
    if not isinstance(values, dict):
        raise UserError(
            f"{file}: expected a mapping of threshold names to numbers, got {type(values).__name__}"
        )
    for name in values:
        if name not in THRESHOLDS:
            near = difflib.get_close_matches(clip(name), THRESHOLDS, n=1)
            hint = f" Did you mean {near[0]}?" if near else f" There are {', '.join(THRESHOLDS)}."
            raise UserError(f"{file}: no threshold {clip(name)}.{hint}")
    return {name: _number(value, f"{file}: {clip(name)}") for name, value in values.items()}


def _number(value: object, where: str) -> float:
    """Return a number; YAML 1.1 reads ``1e-3`` as a text."""
    try:
        number = float("nan") if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not 0 <= number < float("inf"):
        raise UserError(f"{where}: expected a number of at least 0, got {quote(value)}")
    return number
