"""Every tolerance of every check: a name, a value per dtype, and where the value comes from."""

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
"""How many times the tolerance of the other rows a single row may have: ``P95``.

The worst rows of sound engines stay below the tolerance itself (0.7 of it at most, of all checks
and types, measured as the tolerances are); a row that is another one's has an error of about 1.4.
"""

ROUNDING = 3
"""How many times the error of PyTorch's modules in the engine's type a tensor may have that leaves
its tolerance: both sides may err so, and half of that again for kernels that sum in another order.
"""
MOST_ROUNDING = 0.35
"""What that may never exceed: a quarter of a row that is another one's."""
MOST_NATS = 3.0
"""The same of log-probabilities: another node's are further off."""

Better = Literal["low", "high"]


@dataclass(frozen=True)
class Threshold:
    """A tolerance.

    Attributes:
        metric: what is measured, in words. better: ``low`` = must not exceed it, ``high`` = must
            not fall below it.
        values: dtype of the engine -> value. origin: why this value.
        logarithmic: measure the distance to a tolerance in powers of ten, for p-values.
    """

    metric: str
    better: Better
    values: Mapping[str, float]
    origin: str
    logarithmic: bool = False


def _same(value: float) -> dict[str, float]:
    return dict.fromkeys(("float32", "float16", "bfloat16"), value)


_EXACT = "no arithmetic that may round lies between the two"
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
        "INT4 in groups of 128 leaves 0.1 of a row, 0.2 where a group is nearly empty; a scale or "
        "a number in another one's place leaves about 1",
    ),
    "pixel_values": Threshold(
        "largest difference",
        "low",
        _same(1e-6),
        "images are equal; of videos transformers folds the rescaling into mean and std, which "
        "moves the last bit (6e-8 measured); one level of 255 would be 8e-3",
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
        f"{_MEASURED}; errors of all layers before are in it",
    ),
    "layer_step": Threshold(
        "relative L2 error of a row, worst",
        "low",
        {"float32": 2e-5, "float16": 1e-2, "bfloat16": 7e-2},
        f"{_MEASURED}; one layer alone, fed with the engine's own input",
    ),
    "kv_attention": Threshold(
        "relative L2 error of a row, worst",
        "low",
        {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2},
        "attention alone, over the very numbers of the cache: 8 times what a launch may err by in "
        "the kernels' tests; a scale in another one's place leaves about 1",
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
        "neither rounding (tie_margin) nor a probability that is nearly the same can turn such a "
        "row's best token",
    ),
    "top5": Threshold(
        "rows whose best token is among the reference's best five, of the others",
        "high",
        {"float32": 1.0, "float16": 1.0, "bfloat16": 0.98},
        "near-ties of two tokens stay inside the best five",
    ),
    "tie_margin": Threshold(
        "logits that the reference prefers its token by, over the root mean square of the row's "
        "logits",
        "low",
        {"float32": 2e-5, "float16": 3e-2, "bfloat16": 3e-1},
        "4 times the worst relative L2 error of logits measured of sound engines: the error of a "
        "difference of two logits, at three standard deviations",
    ),
    "drawn_tie": Threshold(
        "probability of all likelier tokens, of drawn tokens that differ",
        "low",
        {"float32": 0.0, "float16": 0.9999, "bfloat16": 0.9999},
        "the random numbers of a seed belong to a tree, and a draft that rounds otherwise drafts "
        "another one: both tokens are then draws of their own, of which one in ten thousand lies "
        "so deep in the tail. In float32 drafts are the same, and no mismatch is a tie",
    ),
    "seed_draws": Threshold(
        "share of a seed's draws at temperature 5 that come out otherwise when drawn again",
        "low",
        {"float32": 0.0, "float16": 0.5, "bfloat16": 0.5},
        "nine of ten draws of an ignored seed (measured on a trained pair, whose model is sure), "
        "one of fifteen where rounding by 2 % has other trees drafted",
    ),
    "token_failures": Threshold(
        "mismatches that are no ties", "low", _same(0.0), "greedy decoding is deterministic"
    ),
    "logprobs": Threshold(
        "largest difference, nats",
        "low",
        {"float32": 1e-3, "float16": 1e-1, "bfloat16": 1.0},
        "the error of a logit of six standard deviations, by the relative error of logits; another "
        "node's or the draft's distribution is several nats off",
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
        "the same proposals are accepted alike; below float32 a few near-ties of the draft fall "
        "otherwise, and one cycle is not counted",
    ),
    "sampling_probabilities": Threshold(
        "largest difference of a probability",
        "low",
        _same(1e-5),
        "float32 softmax over the same logits in another order of sums; 1e-7 measured",
    ),
    "sampling_frequencies": Threshold(
        "p-value, the least of all",
        "high",
        _same(1e-6),
        "seeded, so the same on every run; a right sampler falls below once in a million draws "
        "of the seed",
        logarithmic=True,
    ),
}
"""Name -> tolerance. ``--thresholds FILE`` overrides values by these names."""


@dataclass(frozen=True)
class Override:
    """A value the user gave in place of ours."""

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
        """Whether ``value`` is within it; NaN never is."""
        return value <= self.value if self.better == "low" else value >= self.value

    def used(self, value: float) -> float | None:
        """Share of the tolerance that ``value`` uses: 0 is perfect, above 1 fails.

        None if nothing may differ, or everything may.
        """
        room, gone = self._distance(self.value), self._distance(value)
        if room <= 0 or math.isinf(room):
            return None
        return max(gone, 0.0) / room

    def _distance(self, value: float) -> float:
        """Distance from the perfect value: 0, or 1 if high is better."""
        if self.better == "low":
            return value
        if self.logarithmic:
            return -math.log(value) if value > 0 else math.inf
        return 1 - value


class Thresholds:
    """The tolerances of one dtype, with the user's overrides; ``own``: those of another dtype."""

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
        """What the user changed."""
        return [
            Override(name, THRESHOLDS[name].values[self._dtype_of(name)], v)
            for name, v in self._overrides.items()
        ]


def read_overrides(file: Path) -> dict[str, float]:
    """A YAML mapping of threshold names to numbers.

    Raises:
        UserError: unreadable, not such a mapping, or an unknown name (the message gives the
            nearest).
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
    """A number; YAML 1.1 takes ``1e-3`` for a text."""
    try:
        number = float("nan") if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not 0 <= number < float("inf"):
        raise UserError(f"{where}: expected a number of at least 0, got {quote(value)}")
    return number
