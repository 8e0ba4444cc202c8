"""Positions against transformers' get_rope_index, on random mixtures and on one worked by hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.multimodal.record_goldens import build_model
from trt_eagle3.families.qwen3_vl.rope_index import rope_index

TEXT, IMAGE, VIDEO = 0, 1, 2

text_runs = st.tuples(st.just(TEXT), st.integers(1, 9), st.just(0), st.just(0))
images = st.tuples(st.just(IMAGE), st.just(1), st.integers(1, 6), st.integers(1, 6))
videos = st.tuples(st.just(VIDEO), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
prompts = st.lists(st.one_of(text_runs, images, videos), min_size=1, max_size=7)


@cache
def hf_model() -> Any:
    class Tokenizer:
        def __len__(self) -> int:
            return 16

        def convert_tokens_to_ids(self, name: str) -> int:
            return {
                "<|image_pad|>": 1,
                "<|video_pad|>": 2,
                "<|vision_start|>": 3,
                "<|vision_end|>": 4,
            }[name]

    return build_model(Tokenizer())


def lay_out(
    parts: list[tuple[int, int, int, int]],
) -> tuple[list[int], list[list[int]], dict[int, list[list[int]]]]:
    """Token types, grids in prompt order, grids by type; every frame stands between text tokens,
    as in prompts.
    """
    types: list[int] = []
    grids: list[list[int]] = []
    by_type: dict[int, list[list[int]]] = {IMAGE: [], VIDEO: []}
    for kind, t, h, w in parts:
        if kind == TEXT:
            types += [TEXT] * t
            continue
        for _ in range(t):
            types += [TEXT] + [kind] * (h * w) + [TEXT]
        grids.append([t, 2 * h, 2 * w])
        by_type[kind].append(grids[-1])
    return types, grids, by_type


def grid_tensor(grids: list[list[int]]) -> Tensor:
    return torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)


def hf_rope_index(types: list[int], by_type: dict[int, list[list[int]]]) -> tuple[Tensor, int]:
    kinds = torch.tensor([types])
    positions, deltas = hf_model().get_rope_index(
        torch.zeros_like(kinds),
        mm_token_type_ids=kinds,
        image_grid_thw=grid_tensor(by_type[IMAGE]) if by_type[IMAGE] else None,
        video_grid_thw=grid_tensor(by_type[VIDEO]) if by_type[VIDEO] else None,
    )
    return positions[:, 0], int(deltas[0])


@settings(max_examples=150, deadline=None)
@given(prompts)
def test_positions_equal_hf(parts: list[tuple[int, int, int, int]]) -> None:
    types, grids, by_type = lay_out(parts)
    positions, delta = rope_index(torch.tensor(types) != TEXT, grid_tensor(grids), 2)
    expected, expected_delta = hf_rope_index(types, by_type)
    assert positions.dtype == torch.int32
    assert torch.equal(positions, expected.int())
    assert delta == expected_delta


def test_swapped_height_and_width_would_be_noticed() -> None:
    types, grids, by_type = lay_out([(TEXT, 3, 0, 0), (IMAGE, 1, 2, 3), (TEXT, 2, 0, 0)])
    swapped = grid_tensor(grids)[:, [0, 2, 1]]
    positions, _ = rope_index(torch.tensor(types) != TEXT, swapped, 2)
    assert not torch.equal(positions, hf_rope_index(types, by_type)[0].int())


def test_image_between_texts_by_hand() -> None:
    # tokens  a  [2 rows x 3 columns]  b
    visual_rows = torch.tensor([False, *[True] * 6, False])
    positions, delta = rope_index(visual_rows, torch.tensor([[1, 4, 6]]), 2)
    assert positions.tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4],
        [0, 1, 1, 1, 2, 2, 2, 4],
        [0, 1, 2, 3, 1, 2, 3, 4],
    ]
    assert delta == 5 - 8


def test_text_alone_counts_up_with_delta_zero() -> None:
    positions, delta = rope_index(
        torch.zeros(5, dtype=torch.bool), torch.empty(0, 3, dtype=torch.int64), 2
    )
    assert positions.tolist() == [list(range(5))] * 3
    assert delta == 0


def test_rows_that_do_not_match_the_grid_are_our_bug() -> None:
    with pytest.raises(AssertionError, match="2 visual rows for frames of"):
        rope_index(torch.tensor([True, True, False]), torch.tensor([[1, 2, 2]]), 2)
