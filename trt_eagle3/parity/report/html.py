"""The report as one self-contained page."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    environment.filters |= {"number": _number, "room": _room}
    template = environment.from_string(
        files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8")
    )
    drawn = {name: getattr(plots, name)(report) for name in plots.__all__}
    return template.render(r=report, plots=drawn, stages=_stages(report), counts=_counts(report))


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


def _room(check: CheckResult) -> float | None:
    """How much of the tolerance is used, 0 to 100 over six decades of a logarithmic scale; None
    without a scale.
    """
    if check.measured is None or check.comparison == ">=" or check.tolerance <= 0:
        return None
    if check.measured <= 0:
        return 0.0
    if math.isinf(check.measured):
        return 100.0
    decades = math.log10(check.measured / check.tolerance)
    return round(max(2.0, min(100.0, 100 * (1 + decades / 6))), 1)
