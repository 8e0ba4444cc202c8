"""Tokens of padding are of all the vocabulary: a mixture of experts then takes its usual time."""

from __future__ import annotations

import pytest
import torch

from trt_eagle3.decode.forward.device_batch import DeviceBatch, spread_tokens
from trt_eagle3.decode.memory.state import LayerStates, PagedStates

CPU = torch.device("cpu")


@pytest.mark.parametrize("vocab", [24, 100, 151936])
def test_spread_tokens_differ_while_there_are_enough(vocab: int) -> None:
    tokens = spread_tokens((4, 6), vocab, CPU)
    assert tokens.shape == (4, 6)
    assert len(tokens.unique()) == 24
    assert int(tokens.min()) == 0
    assert vocab // 2 < int(tokens.max()) < vocab


def test_spread_tokens_of_a_small_vocabulary_stay_in_it() -> None:
    assert set(spread_tokens((7,), 3, CPU).tolist()) == {0, 1, 2}


def test_dummy_batch_has_roots_of_all_the_vocabulary() -> None:
    states = LayerStates(PagedStates([], 0))
    batch = DeviceBatch.dummy(states, 8, 4, 1000, CPU)
    assert len(batch.roots.unique()) == 8
    assert batch.roots.dtype == torch.int32
