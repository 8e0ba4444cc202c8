"""Draws docs/parity.svg, the head of the page that ``validate`` writes, from its report:

trt-eagle3 validate engines/tiny && python tools/parity_picture.py engines/tiny/parity/report.json
"""

from __future__ import annotations

import re
import sys
from html import escape
from importlib.resources import files
from pathlib import Path

from trt_eagle3.parity.report import plots
from trt_eagle3.parity.report.result import Report

PICTURE = Path(__file__).parent.parent / "docs/parity.svg"
_TITLES = {
    "layer_errors": "Error of each decoder layer against PyTorch",
    "margins": "How sure the reference was of each token",
    "acceptance": "Accepted draft tokens by position",
    "lengths": "Tokens of one target forward",
}
_WIDTH, _HEIGHT, _MARGIN = 500, 258, 16
"""Of a plot; between plots."""
_STAGE_HEIGHT, _LETTER = 24, 6.6
_PAGE_WIDTH = 2 * _WIDTH + 3 * _MARGIN


def picture(report: Report) -> str:
    """An SVG of its own, in the colours of the page, light or dark."""
    drawn = {name: getattr(plots, name)(report) for name in _TITLES}
    stages, bottom = _stages(report)
    shown = [(name, plot) for name, plot in drawn.items() if plot]
    boxes = [_plot(i, _TITLES[name], plot, bottom) for i, (name, plot) in enumerate(shown)]
    rows = -(-len(shown) // 2)
    height = bottom + rows * (_HEIGHT + 34 + _MARGIN) + _MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="0 0 {_PAGE_WIDTH} {height}" font-family="system-ui, sans-serif">',
            f"<style>{_colours()} text {{ fill: var(--ink) }}</style>",
            f'<rect width="{_PAGE_WIDTH}" height="{height}" fill="var(--page)"/>',
            *_heading(report),
            *stages,
            *boxes,
            "</svg>\n",
        ]
    )


def _colours() -> str:
    """The variables of the page's style sheet, for light and dark."""
    style = files("trt_eagle3.parity.report").joinpath("report.css").read_text("utf-8")
    light, dark = re.findall(r":root \{([^}]*)\}", style)[:2]
    return f":root {{{light}}} @media (prefers-color-scheme: dark) {{ :root {{{dark}}} }}"


def _heading(report: Report) -> list[str]:
    status, word = ("good", "PASSED") if report.passed else ("bad", "FAILED")
    bundle = report.bundle
    about = f"{bundle.name}: {bundle.backend}, {bundle.dtype}, against {report.reference}"
    return [
        f'<rect x="{_MARGIN}" y="16" width="112" height="38" rx="9" fill="var(--{status}-wash)"/>',
        f'<text x="{_MARGIN + 56}" y="41" text-anchor="middle" font-size="18" font-weight="700" '
        f'style="fill: var(--{status})">{word}</text>',
        f'<text x="{_MARGIN + 130}" y="41" font-size="17">{escape(about)}</text>',
    ]


def _stages(report: Report) -> tuple[list[str], int]:
    """A label for each stage in the order of the data, and where they end."""
    status: dict[str, str] = {}
    for check in report.checks:
        if check.status in ("passed", "failed"):
            worst = status.get(check.stage, "good")
            status[check.stage] = "bad" if check.status == "failed" else worst
    x, y, found = float(_MARGIN), 70, []
    for name, colour in status.items():
        width = 22 + _LETTER * len(name)
        if x + width > _PAGE_WIDTH - _MARGIN:
            x, y = float(_MARGIN), y + _STAGE_HEIGHT + 8
        found.append(
            f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{_STAGE_HEIGHT}" rx="12" '
            f'fill="var(--{colour}-wash)"/><text x="{x + width / 2:.0f}" y="{y + 16}" '
            f'text-anchor="middle" font-size="12.5" style="fill: var(--{colour})">{escape(name)}'
            "</text>"
        )
        x += width + 8
    return found, y + _STAGE_HEIGHT + _MARGIN


def _plot(index: int, title: str, plot: str, top: int) -> str:
    """The card of one plot; ``top`` of the first row."""
    x = _MARGIN + index % 2 * (_WIDTH + _MARGIN)
    y = top + index // 2 * (_HEIGHT + 34 + _MARGIN)
    place = f'<svg x="{x}" y="{y + 30}" width="{_WIDTH}" height="{_HEIGHT}"'
    return (
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT + 34}" rx="12" '
        f'fill="var(--card)" stroke="var(--line)"/><text x="{x + 16}" y="{y + 22}" '
        f'font-size="14" font-weight="600">{title}</text>\n{plot.replace("<svg", place, 1)}'
    )


def main(report: Path, output: Path = PICTURE) -> None:
    """Write the picture."""
    output.write_text(picture(Report.model_validate_json(report.read_bytes())), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
