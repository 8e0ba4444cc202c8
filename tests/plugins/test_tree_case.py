"""The check of attention's rows finds a wrong one among right ones, and padding that is not 0."""

from __future__ import annotations

import pytest
import torch

from tests.plugins.tree_case import Case, check_rows, draw, reference

CASE = Case(lengths=((300, 30), (7, 31)), num_new=32, tail=32, dtype=torch.float32)


@pytest.mark.parametrize(("row", "fault"), [(None, 0.0), (12, 0.05), (31, 1e-6)])
def test_one_wrong_row_or_padding_is_found(row: int | None, fault: float) -> None:
    wanted = reference(CASE, draw(CASE, seed=0, device=torch.device("cpu")))
    out = wanted.float().flatten(2).flatten(0, 1)
    if row is None:
        check_rows(CASE, out, wanted, 4e-3)
        return
    out[row] += fault * out[12].abs().max()
    with pytest.raises(AssertionError):
        check_rows(CASE, out, wanted, 4e-3)
