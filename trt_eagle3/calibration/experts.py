"""Scale and quantise the experts of one layer, each by the rows that it receives, one by one.

Shapes: n rows of an expert, H hidden, I inner width, E experts, G groups of columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from trt_eagle3.calibration.activations import MAX_SAMPLES, ExpertRows, RowStatistics
from trt_eagle3.calibration.rounding import InputRounding, round_without_data
from trt_eagle3.calibration.search import search_scales
from trt_eagle3.engine.builder.calibration import Fold

__all__ = ["LEAST_ROWS", "MadeExperts", "make_experts"]

LEAST_ROWS = 16
"""Number of rows, over all prompts, below which an expert is quantised without data."""

_INNER = Fold("up", ("down",))
"""The fold of an expert's own matrices."""
Stored = tuple[Tensor, Tensor]
"""Codes and scales of a matrix."""


@dataclass(frozen=True)
class MadeExperts:
    """The quantised experts of a layer.

    Attributes:
        gate_up, down: codes int32 and scales bfloat16 of all experts, in order.
        scales: float32 [E, 2 I], the divisors of the rows of gate_up.
        without_data: number of experts with too few rows.
    """

    gate_up: Stored
    down: Stored
    scales: Tensor
    without_data: int


@dataclass(frozen=True)
class _Made:
    """One quantised expert; ``scales``: float32 [2 I]."""

    gate_up: Stored
    down: Stored
    scales: Tensor
    of_data: bool


def make_experts(
    gate_up: Tensor, down: Tensor, rows: ExpertRows, columns: Tensor | None
) -> MadeExperts:
    """Quantise the weights float32 [E, 2 I, H] and [E, H, I] to INT4.

    Args:
        rows: input of gate_up.
        columns: scales [H] that multiply its columns.
    """
    made = list(_each(gate_up, down, rows, columns))
    return MadeExperts(
        _joined([expert.gate_up for expert in made]),
        _joined([expert.down for expert in made]),
        torch.stack([expert.scales for expert in made]),
        sum(not expert.of_data for expert in made),
    )


def _each(
    gate_up: Tensor, down: Tensor, rows: ExpertRows, columns: Tensor | None
) -> Iterator[_Made]:
    for expert, (first, second) in enumerate(zip(gate_up, down, strict=True)):
        scaled = first if columns is None else first * columns.to(first.device)
        own = rows.of(expert)
        if len(own) < LEAST_ROWS:
            ones = torch.ones(len(first))
            yield _Made(round_without_data(scaled), round_without_data(second), ones, of_data=False)
            continue
        gate, up = (own @ first.T).chunk(2, dim=-1)
        outer, inner = _statistics(own), _statistics(silu(gate) * up)
        scales = search_scales(_INNER, [second], inner, None)
        of_rows = torch.cat([torch.ones_like(scales), scales])
        yield _Made(
            InputRounding(outer, columns).round(scaled / of_rows[:, None]),
            InputRounding(inner, scales).round(second * scales),
            of_rows.cpu(),
            of_data=True,
        )


def _statistics(rows: Tensor) -> RowStatistics:
    found = RowStatistics(-(-len(rows) // MAX_SAMPLES))
    found.add(rows)
    return found


def _joined(parts: list[Stored]) -> Stored:
    codes, scales = (torch.cat(column) for column in zip(*parts, strict=True))
    return codes, scales
