"""Compute rope frequencies equal to transformers' ``ROPE_INIT_FUNCTIONS``; read rope configs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trt_eagle3.checkpoint.config_value import config_value
from trt_eagle3.errors import UserError, clip, quote
from trt_eagle3.spec import RopeLayout, RopeSpec

__all__ = ["SCHEDULES", "RopeConfig", "make_rope", "read_rope_config"]

Floats = NDArray[np.float32]
Numbers = Mapping[str, float]


@dataclass(frozen=True)
class RopeConfig:
    """The rope of a config, before a producer's convention applies.

    Attributes:
        values: ``rope_parameters``, else ``rope_scaling``, else empty; and
            ``partial_rotary_factor``, from any place.
        base: theta, from any place; None if absent.
        where: the keys in ``file`` that were read.
    """

    values: Mapping[str, Any]
    base: float | None
    where: str
    file: Path

    def kind(self, first: str = "rope_type", second: str = "type") -> str:
        """Return the schedule's name. Producers differ in which key takes precedence."""
        return _kind(self.values, self.file, (first, second))

    @property
    def sections(self) -> tuple[int, ...]:
        """``mrope_section``; empty if absent."""
        return tuple(config_value(self.values, "mrope_section", "wholes", self.file) or ())

    @property
    def interleaved(self) -> bool:
        """``mrope_interleaved``."""
        return bool(config_value(self.values, "mrope_interleaved", "flag", self.file))

    @property
    def part(self) -> float:
        """``partial_rotary_factor``: the fraction of a head's channels that are rotated."""
        found = config_value(self.values, "partial_rotary_factor", "number", self.file)
        return 1.0 if found is None else float(found)

    def unscaled(self, rotary_dim: int, sections: tuple[int, ...]) -> RopeSpec:
        """Create the unscaled, interleaved schedule over ``rotary_dim`` channels of a head.

        Args:
            sections: default if the config names none.
        Raises:
            UserError: the sections do not fit.
        """
        assert self.base is not None
        try:
            return RopeSpec.plain(rotary_dim, self.base, "interleaved", self.sections or sections)
        except UserError as error:
            raise UserError(f"{self.file}: {error}") from error


def read_rope_config(config: Mapping[str, Any], file: Path, fix: str = "") -> RopeConfig:
    """Read the rope of a config in either spelling, or in both if they agree.

    Args:
        fix: alternative to correcting the file, for the error.
    Raises:
        UserError: the two spellings contradict each other.
    """

    def agree(key: str, found: Mapping[str, Any]) -> Any:
        given = [(place, value) for place, value in found.items() if value is not None]
        for place, value in given[1:]:
            if value != given[0][1]:
                raise UserError(
                    f"{file}: {clip(key, 80)}: {clip(given[0][1], 80)} by {given[0][0]}, "
                    f"{clip(value, 80)} by {place}. Keep the one it was trained with{fix}."
                )
        return given[0][1] if given else None

    new, old = (
        config_value(config, key, "object", file) or {}
        for key in ("rope_parameters", "rope_scaling")
    )
    if new and old:
        kinds = {
            name: _kind(part, file)
            for name, part in (("rope_parameters", new), ("rope_scaling", old))
        }
        agree("rope_type", kinds)
        for key in sorted(new.keys() & old.keys() - {"type", "rope_type"}):
            agree(key, {"rope_parameters": new[key], "rope_scaling": old[key]})
    places = ("rope_parameters.rope_theta", "rope_scaling.rope_theta", "rope_theta")
    bases = {place: config_value(config, place, "number", file) for place in places}
    base = agree("rope_theta", bases)
    values, key = new or old, "partial_rotary_factor"
    partial = agree(
        key,
        {
            "rope": config_value(values, key, "number", file),
            "the config itself": config_value(config, key, "number", file),
        },
    )
    if partial is not None:
        values = {**values, key: partial}
    keys = [name for name, part in (("rope_parameters", new), ("rope_scaling", old)) if part][:1]
    keys += [place for place in places if bases[place] is not None][:1]
    return RopeConfig(
        values, None if base is None else float(base), ", ".join(keys) or "no rope key", file
    )


def _kind(
    values: Mapping[str, Any], file: Path, keys: tuple[str, str] = ("rope_type", "type")
) -> str:
    names = [config_value(values, key, "text", file) for key in keys]
    return str(names[0] or names[1] or "default")


def make_rope(
    kind: str,
    base: float,
    head_dim: int,
    *,
    layout: RopeLayout = "1d",
    sections: tuple[int, ...] = (),
    parameters: Mapping[str, Any] | None = None,
    max_positions: int = 0,
) -> RopeSpec:
    """Create the rope of a schedule by name.

    Args:
        parameters: a rope config, of which the schedule uses its numbers.
        max_positions: the config's ``max_position_embeddings``. yarn derives a missing factor from
            it.
    Raises:
        UserError: the schedule is unknown, or a number that it needs is missing.
    """
    if kind not in SCHEDULES:
        raise UserError(
            f"rope: rope_type {quote(kind)}: not supported; supported: {', '.join(SCHEDULES)}"
        )
    if not 1 < base < 1e30 or head_dim <= 0 or head_dim % 2:
        raise UserError(
            f"rope: base {base:g} and head_dim {head_dim}: expected a base above 1 and an even "
            "head_dim"
        )
    partial = (parameters or {}).get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise UserError(
            f"rope: partial_rotary_factor: expected 1, got {clip(partial)}: not supported. If "
            "whole heads are rotated, set it to 1"
        )
    required, optional, schedule = SCHEDULES[kind]
    numbers = _numbers(kind, parameters or {}, required, optional, max_positions)
    inv_freq, attention_scaling = schedule(base, head_dim, numbers)
    return RopeSpec(
        layout=layout,
        sections=sections,
        inv_freq=tuple(float(f) for f in inv_freq),
        attention_scaling=attention_scaling,
        kind=kind,
        base=base,
        parameters=numbers,
    )


def _numbers(
    kind: str,
    given: Mapping[str, Any],
    required: tuple[str, ...],
    optional: tuple[str, ...],
    max_positions: int,
) -> dict[str, float]:
    found = {
        key: config_value(given, key, "number", Path("rope"))
        for key in (*required, *optional)
        if key != "truncate"
    }
    numbers = {key: float(value) for key, value in found.items() if value is not None}
    if "truncate" in optional and given.get("truncate") is not None:
        numbers["truncate"] = float(bool(given["truncate"]))
    if (
        kind == "yarn"
        and "factor" not in numbers
        and max_positions
        and "original_max_position_embeddings" in numbers
    ):
        numbers["factor"] = max_positions / numbers["original_max_position_embeddings"]
    missing = [key for key in required if key not in numbers]
    if missing:
        raise UserError(
            f"rope: rope_type {kind} needs {', '.join(missing)}. Write what the model was trained "
            "with into its config, a draft's into draft.overrides.rope"
        )
    positive = (*required, "attention_factor", "beta_fast", "beta_slow")
    wrong = [key for key in positive if key in numbers and not _sane(key, numbers[key])]
    if wrong:
        raise UserError(f"rope: {wrong[0]}: expected a positive number, got {numbers[wrong[0]]:g}")
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        raise UserError(
            "rope: low_freq_factor: expected less than high_freq_factor, got "
            f"{numbers['low_freq_factor']:g} and {numbers['high_freq_factor']:g}"
        )
    return numbers


def _sane(key: str, number: float) -> bool:
    """Return whether a number is positive in float32. A beta of 0 stands for its default."""
    return number > 1e-30 or (number == 0 and key.startswith("beta_"))


def _plain(base: float, head_dim: int) -> Floats:
    return np.asarray(RopeSpec.plain(head_dim, base).inv_freq, dtype=np.float32)


def _default(base: float, head_dim: int, _: Numbers) -> tuple[Floats, float]:
    return _plain(base, head_dim), 1.0


def _linear(base: float, head_dim: int, n: Numbers) -> tuple[Floats, float]:
    return _plain(base, head_dim) / np.float32(n["factor"]), 1.0


def _llama3(base: float, head_dim: int, n: Numbers) -> tuple[Floats, float]:
    inv_freq = _plain(base, head_dim)
    low, high, old = (
        n["low_freq_factor"],
        n["high_freq_factor"],
        n["original_max_position_embeddings"],
    )
    wavelength = np.float32(2 * math.pi) / inv_freq
    slow = np.where(wavelength > old / low, inv_freq / np.float32(n["factor"]), inv_freq)
    smooth = (np.float32(old) / wavelength - np.float32(low)) / np.float32(high - low)
    smoothed = (1 - smooth) * slow / np.float32(n["factor"]) + smooth * slow
    between = ~(wavelength < old / high) & ~(wavelength > old / low)
    return np.where(between, smoothed, slow).astype(np.float32), 1.0


def _yarn(base: float, head_dim: int, n: Numbers) -> tuple[Floats, float]:
    factor, old = n["factor"], n["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        return head_dim * math.log(old / (rotations * 2 * math.pi)) / (2 * math.log(base))

    def mscale(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    low, high = dimension(n.get("beta_fast") or 32), dimension(n.get("beta_slow") or 1)
    if n.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / np.float32(high - low or 0.001)
    keep = 1 - np.clip(ramp, 0, 1).astype(np.float32)
    plain = _plain(base, head_dim)
    inv_freq = plain / np.float32(factor) * (1 - keep) + plain * keep
    scaling = n.get("attention_factor")
    if scaling is None:
        both = n.get("mscale") and n.get("mscale_all_dim")
        scaling = mscale(n["mscale"]) / mscale(n["mscale_all_dim"]) if both else mscale(1.0)
    return inv_freq.astype(np.float32), float(scaling)


Schedule = Callable[[float, int, Numbers], tuple[Floats, float]]
_OLD = "original_max_position_embeddings"
SCHEDULES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], Schedule]] = {
    "default": ((), (), _default),
    "linear": (("factor",), (), _linear),
    # scales only past max_position_embeddings, which is not applied
    "dynamic": (("factor",), (), _default),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _OLD), (), _llama3),
    "yarn": (
        ("factor", _OLD),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        _yarn,
    ),
}
"""rope_type -> (required numbers, optional numbers, function).

The function returns the frequencies and the factor on cos and sin.
"""
