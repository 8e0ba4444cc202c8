"""What widths may cost at most and bring at best."""

from __future__ import annotations

import pytest

from tests.decode.simulated_load import Sequence
from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.acceptance_rate import AcceptanceRates, levels_of
from trt_eagle3.decode.cycle_cost import CycleCosts, prior_of
from trt_eagle3.decode.load_cost import LoadCosts
from trt_eagle3.decode.outlook import best_rates, most_seconds
from trt_eagle3.decode.plan import shrunk
from trt_eagle3.decode.width import DecodingBatch, Width

TREES = [shrunk(SpeculationConfig(mode="chain", steps=3), n) for n in (1, 2, 3, 4)]
WIDTHS = [Width(tree, levels_of(tree)) for tree in TREES]
BATCH = DecodingBatch([Sequence(10, 0.5)])  # type: ignore[list-item]


def costs(*seconds: float) -> LoadCosts:
    """Of the first widths, timed often."""
    found = CycleCosts(prior_of(None, 0.0))
    for width, each in zip(WIDTHS, seconds, strict=False):
        for _ in range(4):
            found.observe(width.shape(BATCH), each)
    return LoadCosts(found)


def test_unknown_widths_may_be_dearer_the_further_from_a_known_one() -> None:
    found = costs(0.01, 0.012)
    times = [
        most_seconds(found, WIDTHS, BATCH, i) / found.seconds(WIDTHS[i].shape(BATCH))
        for i in range(4)
    ]
    assert times == pytest.approx([1.0, 1.0, 1.05, 1.05**2])


def test_unknown_width_is_never_cheaper_than_a_known_narrower_one() -> None:
    acceptance = AcceptanceRates({})
    found = costs(0.01, 0.03)  # far dearer than the wider ones are reckoned
    tokens = [acceptance.expected_tokens(w.levels) for w in WIDTHS]
    rates = [n / found.seconds(w.shape(BATCH)) for n, w in zip(tokens, WIDTHS, strict=True)]
    best = best_rates(found, acceptance, WIDTHS, BATCH, rates)
    cheapest = [acceptance.most_tokens(w.levels) / b for w, b in zip(WIDTHS, best, strict=True)]
    assert cheapest[0] == pytest.approx(0.01 / 1.02, rel=1e-3)
    assert cheapest[1] == pytest.approx(0.03 / 1.02, rel=1e-3)
    assert min(cheapest[2:]) >= cheapest[1] * (1 - 1e-9)
    assert all(b >= r for b, r in zip(best, rates, strict=True))


def test_width_that_was_never_seen_may_be_better_by_more_than_a_known_one() -> None:
    acceptance = AcceptanceRates({})
    rates = [1.0] * 4
    known, unknown = (
        best_rates(found, acceptance, WIDTHS, BATCH, rates)[1]
        for found in (costs(0.01, 0.0125), costs(0.01))
    )
    assert unknown > known
