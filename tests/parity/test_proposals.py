"""Whose children a draft's tokens are, where logits of 16 bits are equal."""

from __future__ import annotations

from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trt_eagle3.parity.record.cycles import Cycle, Drafted
from trt_eagle3.parity.record.engine import RecordedForward
from trt_eagle3.parity.reference.proposals import CycleState, read_proposals

TABLE = torch.eye(8)
LOGITS = torch.tensor([5.0, 1.0, 3.0, 3.0, 3.0, 0.0, 3.0, 2.0])
"""Tokens 2, 3, 4 and 6 share the second place: two of them are of the best three."""
EQUAL = (2, 3, 4, 6)


def reference() -> Any:
    def embed(ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return TABLE[ids].to(dtype)

    target = SimpleNamespace(embed=embed)
    return SimpleNamespace(
        mask_row=None, width=3, embed=embed, target=target, target_ids=lambda ids: ids
    )


def drafted(token: int) -> Drafted:
    return Drafted(TABLE[token], torch.zeros(3), torch.zeros(2), None, depth=1)


def verified(tokens: list[int]) -> RecordedForward:
    """A forward over token 7 as the root, and ``tokens`` as its children."""
    count = 1 + len(tokens)
    mask = torch.eye(count, dtype=torch.bool)
    mask[:, 0] = True
    inputs = {
        "inputs_embeds": TABLE[[7, *tokens]][None],
        "tree_mask": mask[None],
        "query_lengths": torch.tensor([count]),
        "past_lengths": torch.tensor([9]),
        "page_table": torch.ones(1, 1, dtype=torch.int32),
    }
    return RecordedForward("target", inputs, {})


def read(tokens: list[int]) -> tuple[CycleState, list[str]]:
    cycle = Cycle(9, [drafted(token) for token in tokens], verified(tokens))
    state = CycleState(cycle, torch.zeros(2), LOGITS)
    return state, list(read_proposals(state, LOGITS, reference()).wrong)


@pytest.mark.parametrize(("first", "second"), list(permutations(EQUAL, 2)))
def test_any_of_equal_logits_may_be_drafted(first: int, second: int) -> None:
    state, wrong = read([0, first, second])
    assert wrong == []
    assert [node.rank for node in state.nodes[1:]] == [0, 1, 2]
    assert [node.row for node in state.nodes[1:]] == [0, 1, 2]


@pytest.mark.parametrize("token", [1, 5, 7])
def test_a_worse_token_is_told(token: int) -> None:
    _, wrong = read([0, token])
    assert wrong == ["drafted row 1 at depth 1", "node 2 at depth 1"]


def test_logits_that_are_no_numbers_have_no_best_token() -> None:
    state = CycleState(Cycle(9, [drafted(0)]), torch.zeros(2), LOGITS)
    found = read_proposals(state, torch.full((8,), torch.nan), reference())
    assert found.wrong == ["drafted row 0 at depth 1"]
