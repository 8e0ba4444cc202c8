"""Rows of shared tensors, gathered."""

from __future__ import annotations

import random

import pytest
import torch

from trt_eagle3.decode.memory.tensor_row import TensorRow, gather_padded, gather_rows


def tables(count: int = 5) -> list[torch.Tensor]:
    return [torch.arange(6 * 3).view(6, 3) + 100 * i for i in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_several_tensors_come_in_their_order(seed: int) -> None:
    chance, known = random.Random(seed), tables()
    refs = [
        TensorRow(chance.choice(known), chance.randrange(6)) for _ in range(chance.randint(1, 30))
    ]
    assert torch.equal(gather_rows(refs), torch.stack([ref.tensor[ref.row] for ref in refs]))


def test_all_rows_of_a_tensor_are_no_copy() -> None:
    (table,) = tables(1)
    assert gather_rows([TensorRow(table, i) for i in range(6)]).data_ptr() == table.data_ptr()


def test_rows_that_nobody_wants_are_not_read() -> None:
    """A few rows of each of many tensors that no memory could hold."""
    large = [torch.full((1, 3), i).expand(1 << 40, 3) for i in range(5)]
    found = gather_rows([TensorRow(table, row) for table in large for row in (0, 5)])
    assert found[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_padding_of_shorter_ones_is_behind() -> None:
    one, other = tables(2)
    rows = [[TensorRow(one, 2), TensorRow(other, 4)], [TensorRow(other, 1)]]
    found = gather_padded(rows, 3)
    assert found.shape == (2, 3, 3)
    assert torch.equal(found[0, :2], torch.stack([one[2], other[4]]))
    assert torch.equal(found[1, 0], other[1])
