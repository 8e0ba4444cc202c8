"""The report as one self-contained page."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, get_args

import jinja2

from trt_eagle3.parity.checks.check_recorder import Status
from trt_eagle3.parity.report import plots
from trt_eagle3.parity.report.result import CheckResult, Report

__all__ = ["report_html"]


def report_html(report: Report) -> str:
    """Return the text of the page.

    It loads no other files. Its ``Content-Security-Policy`` permits its own style sheet and nothing
    else: no scripts, no style attributes, no forms.
    """
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"date": _date, "number": _number, "percent": _percent}
    template = environment.from_string(
        files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8")
    )
    style = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    drawn = {name: getattr(plots, name)(report) for name in plots.__all__}
    return template.render(
        r=report,
        style=style,
        policy=_policy(style),
        plots=drawn,
        stages=_stages(report),
        counts=_counts(report),
        counted=_counted(report),
        total=sum(report.seconds.values()),
        **_groups(report.checks),
    )


def _policy(style: str) -> str:
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _groups(checks: Sequence[CheckResult]) -> dict[str, Any]:
    """Group checks by status; ``exact``: how many passed without any difference permitted."""
    grouped = {status: [g for g in checks if g.status == status] for status in get_args(Status)}
    return {**grouped, "exact": sum(g.tolerance == 0 for g in grouped["passed"])}


_PROMPTS = {
    "file": "the prompts of --prompts",
    "bundle": "the bundle's own prompts",
    "generic": "the suite's generic prompts, because the bundle has none of its own",
}


def _counted(report: Report) -> str:
    """Return which cycles the plots of acceptance count."""
    if report.acceptance is None:
        return ""
    prompts = _PROMPTS[report.acceptance.prompts]
    return f"Over {prompts}, each answer up to its end token."


def _date(created_at: str) -> str:
    """Format an ISO time for people, in UTC."""
    return f"{datetime.fromisoformat(created_at).astimezone(UTC):%d %B %Y, %H:%M} UTC"


def _stages(report: Report) -> list[tuple[str, str]]:
    """Return the stages in order of the data flow, each with its worst status."""
    rank = {"not_applicable": 0, "skipped": 1, "passed": 2, "failed": 3}
    worst: dict[str, str] = {}
    for g in report.checks:
        if rank[g.status] >= rank[worst.get(g.stage, "not_applicable")]:
            worst[g.stage] = g.status
    return list(worst.items())


def _counts(report: Report) -> Mapping[str, int]:
    kinds = [m.kind for m in report.mismatches]
    return {
        **{status: report.num_checks(status) for status in get_args(Status)},
        **{kind: kinds.count(kind) for kind in ("tie", "failure")},
        "tokens": len(report.margins),
        "measurements": sum(g.count for g in report.checks),
        "compared": sum(g.compared for g in report.checks),
    }


def _number(value: float | None) -> str:
    """Format a value in three digits, but distinguish 0.9999 from 1."""
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
    """Format a share as a percentage, with two digits if it is small."""
    if share is None:
        return ""
    if math.isinf(share):
        return "infinite"
    value = 100 * share
    if 0 < value < 0.01:
        return "< 0.01 %"
    digits = 0 if value >= 10 else 1 if value >= 1 else 2
    # a share below 1 must not be shown as 100 %
    return "> 99.9 %" if 99.5 <= value < 100 else f"{value:.{digits}f} %"
