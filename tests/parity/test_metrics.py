"""How tensors are compared, by hand: every row counts, and what is no number is as wrong as can
be.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trt_eagle3.parity.metrics import cosines, leads, margins, relative_error, row_errors

EXPECTED = torch.tensor([[3.0, 4.0], [300.0, 400.0], [0.0, 0.0]])


def test_row_error_is_of_each_row_by_its_own_length_and_absolute_where_that_is_zero() -> None:
    actual = EXPECTED + torch.tensor([[0.375, 0.5], [0.375, 0.5], [3.0, 4.0]])
    found = row_errors(actual, EXPECTED)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([0.125, 0.00125, 5.0])
    assert row_errors(EXPECTED, EXPECTED).tolist() == [0.0, 0.0, 0.0]
    cubes = torch.ones(2, 2, 2)
    assert row_errors(2 * cubes, cubes).tolist() == [1.0, 1.0], "a row may have more dimensions"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_as_wrong_as_can_be_in_its_own_row(value: float) -> None:
    actual = EXPECTED.clone()
    actual[1, 0] = value
    assert row_errors(actual, EXPECTED).tolist() == [0.0, math.inf, 0.0]
    assert cosines(actual[:2], EXPECTED[:2]).tolist() == pytest.approx([1.0, -1.0])
    assert relative_error(actual, EXPECTED) == math.inf


def test_relative_error_is_the_worst_difference_over_the_largest_value() -> None:
    actual = EXPECTED.clone()
    actual[0, 1] -= 4.0
    actual[2, 0] += 1.0
    assert relative_error(actual, EXPECTED) == pytest.approx(4.0 / 400.0)
    assert relative_error(torch.tensor([1.0, -3.0]), torch.tensor([1.0, -2.0])) == 0.5


def test_cosine_is_of_directions() -> None:
    expected = torch.tensor([[1.0, 0.0], [1.0, 1.0], [2.0, 0.0], [1.0, 0.0]])
    actual = torch.tensor([[5.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 3.0]])
    assert cosines(actual, expected).tolist() == pytest.approx([1.0, math.sqrt(0.5), -1.0, 0.0])


def test_margin_is_the_difference_of_the_two_best_probabilities() -> None:
    logits = torch.tensor([[0.2, 0.5, 0.3], [0.25, 0.25, 0.5], [0.4, 0.4, 0.2]]).log()
    assert margins(logits).tolist() == pytest.approx([0.2, 0.25, 0.0], abs=1e-6)


def test_lead_is_the_difference_of_the_two_best_logits_over_the_size_of_the_row() -> None:
    logits = torch.tensor([[3.0, 4.0, 0.0, 0.0], [-4.0, -3.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert leads(logits).tolist() == pytest.approx([0.4, 0.0, 0.0])
    assert leads(10 * logits).tolist() == pytest.approx([0.4, 0.0, 0.0])


@pytest.mark.parametrize("compare", [relative_error, row_errors])
def test_tensors_of_other_shapes_are_not_compared(
    compare: Callable[[Tensor, Tensor], object],
) -> None:
    with pytest.raises(AssertionError, match=r"expected \[3, 2\], got \[1, 2\]"):
        compare(EXPECTED[:1], EXPECTED)
