"""What widths may cost at most and bring at best, by what was seen of them so far."""

from __future__ import annotations

from collections.abc import Sequence

from trt_eagle3.decode.acceptance_rate import AcceptanceRates
from trt_eagle3.decode.cycle_cost import Shape
from trt_eagle3.decode.load_cost import LoadCosts
from trt_eagle3.decode.width import DecodingBatch, Width

__all__ = ["LEAST_GAIN", "best_rates", "most_seconds", "rates_of_all"]

LEAST_GAIN = 1.03
"""What a wider tree must promise before it is chosen: less is noise."""

_DEARER = 1.05  # times that a width may be that is unknown, next to a known one


def most_seconds(
    costs: LoadCosts, widths: Sequence[Width], batch: DecodingBatch, index: int
) -> float:
    """Time of a cycle of ``widths[index]`` at most; the further from a known width, the more."""
    unknown = 0
    while unknown < index and not costs.is_known(widths[index - unknown].shape(batch)):
        unknown += 1
    return costs.seconds(widths[index].shape(batch)) * _DEARER**unknown


def best_rates(
    costs: LoadCosts,
    acceptance: AcceptanceRates,
    widths: Sequence[Width],
    batch: DecodingBatch,
    rates: Sequence[float],
) -> list[float]:
    """Speed of every width at best, where ``rates`` are expected: more is accepted than was seen so
    far, and what was not timed, or long ago, costs less; but never less than fewer nodes do.
    """
    found, least = [], 0.0
    for width, rate in zip(widths, rates, strict=True):
        shape = width.shape(batch)
        seconds = costs.seconds(shape)
        cheapest = max(seconds / costs.doubt(shape), least)
        least = cheapest if costs.is_known(shape) else least
        more = acceptance.most_tokens(width.levels) / acceptance.expected_tokens(width.levels)
        found.append(rate * more * seconds / cheapest)
    return found


def rates_of_all(
    costs: LoadCosts,
    acceptance: AcceptanceRates,
    widths: Sequence[Width],
    batch_size: int,
    context: float,
) -> list[float]:
    """Expected speed by width, times that of plain decoding, if the draft follows all of
    ``batch_size`` sequences; ``context``: their mean length.
    """
    return [
        costs.speed(
            Shape(width.num_nodes, width.steps, batch_size, context),
            acceptance.expected_tokens(width.levels),
        )
        for width in widths
    ]
