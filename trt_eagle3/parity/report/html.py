"""The report as one self-contained page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.resources import files

import jinja2

from trt_eagle3.parity.report import plots
from trt_eagle3.parity.report.result import CheckResult, Report

__all__ = ["report_html"]


def report_html(report: Report) -> str:
    """The page's text; it loads nothing from anywhere."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"number": _number, "percent": _percent, "used": _used}
    template = environment.from_string(
        files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8")
    )
    drawn = {name: getattr(plots, name)(report) for name in plots.__all__}
    return template.render(
        r=report,
        plots=drawn,
        stages=_stages(report),
        counts=_counts(report),
        **_groups(report.checks),
    )


def _groups(checks: Sequence[CheckResult]) -> dict[str, list[CheckResult]]:
    """Checks to be shown, and those to be folded: exact ones that hold, and skipped ones."""
    exact = [g for g in checks if g.status == "passed" and g.tolerance == 0]
    skipped = [g for g in checks if g.status == "skipped"]
    shown = [g for g in checks if g not in exact and g not in skipped]
    return {"shown": shown, "exact": exact, "skipped": skipped}


def _stages(report: Report) -> list[tuple[str, str]]:
    """Stages in the order of the data, each with its worst status."""
    rank = {"skipped": 0, "passed": 1, "failed": 2}
    worst: dict[str, str] = {}
    for g in report.checks:
        if rank[g.status] >= rank[worst.get(g.stage, "skipped")]:
            worst[g.stage] = g.status
    return list(worst.items())


def _counts(report: Report) -> Mapping[str, int]:
    verdicts = [m.verdict for m in report.mismatches]
    statuses = [g.status for g in report.checks]
    return {
        **{status: statuses.count(status) for status in ("passed", "failed", "skipped")},
        **{verdict: verdicts.count(verdict) for verdict in ("tie", "failure")},
        "tokens": len(report.margins),
        "measurements": sum(g.count for g in report.checks),
    }


def _number(value: float | None) -> str:
    """Short, and telling 0.9999 from 1."""
    if value is None:
        return ""
    if math.isinf(value):
        return "infinite"
    if 0.99 < value < 1:
        return (
            f"{value:.7f}".rstrip("0")
            if 1 - value > 5e-8
            else f"1 - {1 - value:.0e}".replace("e-0", "e-")
        )
    return f"{value:.3g}".replace("e-0", "e-")


def _percent(share: float | None) -> str:
    """Of 1, with two digits where it is small."""
    if share is None:
        return ""
    if math.isinf(share):
        return "infinite"
    value = 100 * share
    if 0 < value < 0.01:
        return "< 0.01 %"
    digits = 0 if value >= 10 else 1 if value >= 1 else 2
    # what is not all must not be shown as all
    return "> 99.9 %" if 99.5 <= value < 100 else f"{value:.{digits}f} %"


def _used(check: CheckResult) -> float | None:
    """The share of the tolerance that the worst value used; None where nothing may differ, or all
    may. Of a value that may not be less, that is its distance from 1 (``top1``, a cosine).
    """
    if check.measured is None:
        return None
    if check.comparison == ">=":
        room, taken = 1 - check.tolerance, 1 - check.measured
    else:
        room, taken = check.tolerance, check.measured
    if room <= 0 or math.isinf(room):
        return None
    return max(taken, 0.0) / room
