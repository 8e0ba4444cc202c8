"""The report's plots, as inline SVG whose colours follow the page's theme."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trt_eagle3.parity.report.result import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["acceptance", "layer_errors", "lengths", "margins"]

# Placeholder colours for matplotlib; each is replaced by a variable of the page's style sheet.
_COLOURS = {
    "ink": "#010101",
    "muted": "#010202",
    "grid": "#010303",
    "first": "#010404",
    "second": "#010505",
    "good": "#010606",
    "warn": "#010707",
    "bad": "#010808",
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "trt-eagle3",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": _COLOURS["ink"],
    "axes.edgecolor": _COLOURS["muted"],
    "axes.labelcolor": _COLOURS["ink"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _COLOURS["muted"],
    "ytick.color": _COLOURS["muted"],
    "xtick.labelcolor": _COLOURS["ink"],
    "ytick.labelcolor": _COLOURS["ink"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _COLOURS["grid"],
    "grid.linewidth": 0.8,
    "legend.frameon": False,
}
_LEAST = 1e-9  # shown in place of an error of zero on a logarithmic axis


def layer_errors(report: Report) -> str:
    """Plot the error of every decoder layer, end to end and of its own step, with both tolerances.

    Empty without layers.
    """
    shown = report.layers
    if not shown:
        return ""
    limits = {g.name: g.tolerance for g in report.checks}

    def draw(axes: Axes) -> None:
        label = "after all layers up to here (p95)"
        outputs = [e.output for e in shown]
        _draw_errors(axes, outputs, limits["target.layers"], "first", label, above=True)
        label = "this layer alone (worst row)"
        steps = [e.step for e in shown]
        _draw_errors(axes, steps, limits["target.layer_steps"], "second", label, above=False)
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.set_ylim(low / 2, high * 4)
        axes.set_xlabel("decoder layer")
        axes.set_ylabel("relative L2 error")
        _whole_numbers(axes)
        _add_legend(axes, 2)

    return _svg(draw)


def _draw_errors(
    axes: Axes,
    values: Sequence[float | None],
    limit: float,
    colour: str,
    label: str,
    *,
    above: bool,
) -> None:
    """Draw one line of errors by layer and its tolerance, with a note above or below it."""
    if all(v is None for v in values):
        return
    ink = _COLOURS[colour]
    heights = [math.nan if v is None else max(_finite(v), _LEAST) for v in values]
    axes.plot(range(len(values)), heights, "o-", ms=4, lw=1.6, color=ink, label=label)
    axes.axhline(limit, ls="--", lw=1.2, color=ink, alpha=0.8)
    axes.annotate(
        f"allowed {limit:.0e}",
        (1, limit),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3 if above else -11),
        textcoords="offset points",
        ha="right",
        fontsize=8.5,
        color=ink,
    )


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _add_legend(axes: Axes, columns: int) -> None:
    """Add the legend above the plot, from its left edge."""
    anchor = (0.0, 1.0)
    axes.legend(
        loc="lower left", bbox_to_anchor=anchor, ncols=columns, fontsize=9, borderaxespad=0.2
    )


_KINDS = (
    ("same", "first", "same token"),
    ("tie", "warn", "tie"),
    ("failure", "bad", "mismatch"),
)
"""Result, colour, label."""


def margins(report: Report) -> str:
    """Plot the reference's certainty of each answer token, and the tokens that differ.

    Empty without tokens.
    """
    if not report.margins:
        return ""
    values = [[m for m, of in report.margins if of == kind] for kind, _, _ in _KINDS]

    def draw(axes: Axes) -> None:
        labels = [
            f"{label} ({len(found)})" for (_, _, label), found in zip(_KINDS, values, strict=True)
        ]
        colours = [_COLOURS[colour] for _, colour, _ in _KINDS]
        bins = [i / 20 for i in range(21)]
        axes.hist(values, bins=bins, stacked=True, color=colours, label=labels, rwidth=0.9)
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(0, None)
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0f}")
        axes.set_xlim(0, 1)
        axes.set_xlabel("probability of the reference's best token, minus that of its second")
        axes.set_ylabel("answer tokens")
        _add_legend(axes, 3)

    return _svg(draw)


def acceptance(report: Report) -> str:
    """Plot the share of cycles that accept at each draft position, for engine and reference.

    Empty without a draft.
    """
    found = report.acceptance
    if found is None:
        return ""

    def draw(axes: Axes) -> None:
        _draw_shares(axes, -0.2, found.engine, "first", "engine")
        _draw_shares(axes, 0.2, found.reference, "second", "reference draft")
        axes.set_ylim(0, min(1.12, 1.25 * max(*found.engine, *found.reference, 0.05)))
        places = range(len(found.engine))
        axes.set_xticks(list(places), [str(p + 1) for p in places])
        axes.set_xlabel("draft position")
        axes.set_ylabel("cycles that accept it")
        axes.grid(visible=False, axis="x")
        _percentages(axes)
        _add_legend(axes, 2)

    return _svg(draw)


def _draw_shares(
    axes: Axes, shift: float, values: Sequence[float], colour: str, label: str
) -> None:
    places = [p + shift for p in range(len(values))]
    bars = axes.bar(places, values, 0.36, color=_COLOURS[colour], label=label)
    axes.bar_label(bars, [f"{100 * v:.0f}" for v in values], fontsize=8, padding=2)


def _percentages(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda y, _: f"{100 * y:.0f}%")


def lengths(report: Report) -> str:
    """Plot the tokens emitted by each verify forward; empty without a draft."""
    found = report.acceptance
    if found is None or not found.lengths:
        return ""

    def draw(axes: Axes) -> None:
        bars = axes.bar(
            list(found.lengths), list(found.lengths.values()), 0.7, color=_COLOURS["first"]
        )
        axes.bar_label(bars, fontsize=8, padding=2)
        axes.set_xticks(range(1, max(found.lengths) + 1))
        axes.margins(y=0.12)
        axes.set_xlabel("tokens of one verify forward, bonus token included")
        axes.set_ylabel("verify forwards")
        axes.grid(visible=False, axis="x")

    return _svg(draw)


def _finite(value: float) -> float:
    return value if value < float("inf") else 1e3


def _svg(draw: Callable[[Axes], None]) -> str:
    """Return an SVG element of what ``draw`` plots on a pair of axes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(6.4, 3.3), layout="constrained")
        draw(figure.subplots())
        stream = io.StringIO()
        metadata: dict[str, Any] = {"Date": None, "Creator": None}
        figure.savefig(stream, format="svg", transparent=True, metadata=metadata)
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    for name, colour in _COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    # the page permits no style in the plot: each property becomes an attribute of its element
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r' style="([^"]*)"', lambda found: _attributes(found[1]), text)
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*"',
        r'\1 role="img" stroke-linejoin="round" stroke-linecap="butt"',
        re.sub(r' height="[^"]*"', "", text, count=1),
    )


def _attributes(style: str) -> str:
    """Return an element's CSS properties as SVG attributes, without the page's own font."""
    pairs = [declaration.partition(":") for declaration in style.split(";") if declaration.strip()]
    return "".join(
        f' {name.strip()}="{value.strip()}"'
        for name, _, value in pairs
        if name.strip() != "font-family"
    )
