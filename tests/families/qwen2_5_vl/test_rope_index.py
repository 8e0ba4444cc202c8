"""Positions against transformers' get_rope_index, on random mixtures and on one worked by hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

from trt_eagle3.families.qwen2_5_vl.rope_index import rope_index

TEXT, IMAGE, VIDEO = 0, 1, 2
TOKENS_PER_SECOND = 2

Part = tuple[int, int, int, int, float]
"""Kind, temporal patches (of text its length), rows and columns of tokens, seconds a patch."""

text_runs = st.tuples(st.just(TEXT), st.integers(1, 9), st.just(0), st.just(0), st.just(0.0))
images = st.tuples(st.just(IMAGE), st.just(1), st.integers(1, 6), st.integers(1, 6), st.just(0.0))
videos = st.tuples(
    st.just(VIDEO),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([0.1, 0.25, 2 / 3, 1.0, 2 / 23.976, 1.5, 2.7]),
)
prompts = st.lists(st.one_of(text_runs, images, videos), min_size=1, max_size=6)


@cache
def hf_model() -> Any:
    text = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    vision = {"depth": 1, "hidden_size": 8, "num_heads": 1, "out_hidden_size": 8}
    vision |= {"tokens_per_second": TOKENS_PER_SECOND, "intermediate_size": 8}
    with torch.device("meta"):
        return Qwen2_5_VLModel(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def lay_out(parts: list[Part]) -> tuple[Tensor, Tensor, Tensor]:
    """Token kinds, grids and seconds in prompt order; images and videos stand between texts."""
    kinds: list[int] = []
    grids: list[list[int]] = []
    seconds: list[float] = []
    for kind, t, h, w, second in parts:
        if kind == TEXT:
            kinds += [TEXT] * t
            continue
        kinds += [TEXT] + [kind] * (t * h * w) + [TEXT]
        grids.append([t, 2 * h, 2 * w])
        seconds.append(second)
    grid_thw = torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)
    return torch.tensor(kinds), grid_thw, torch.tensor(seconds)


def expected(parts: list[Part]) -> tuple[Tensor, int]:
    kinds, grids, seconds = lay_out(parts)
    of = torch.tensor([kind for kind, *_ in parts if kind != TEXT], dtype=torch.int64)
    positions, deltas = hf_model().get_rope_index(
        torch.zeros_like(kinds)[None],
        kinds[None],
        image_grid_thw=grids[of == IMAGE] if (of == IMAGE).any() else None,
        video_grid_thw=grids[of == VIDEO] if (of == VIDEO).any() else None,
        second_per_grid_ts=seconds[of == VIDEO] if (of == VIDEO).any() else None,
    )
    return positions[:, 0], int(deltas[0])


def ours(parts: list[Part]) -> tuple[Tensor, int]:
    kinds, grids, seconds = lay_out(parts)
    return rope_index(kinds != TEXT, grids, TOKENS_PER_SECOND * seconds, 2)


@settings(max_examples=120, deadline=None)
@given(prompts)
def test_positions_equal_transformers(parts: list[Part]) -> None:
    positions, delta = ours(parts)
    theirs, their_delta = expected(parts)
    assert positions.dtype == torch.int32
    assert torch.equal(positions, theirs.int())
    assert delta == their_delta


def test_video_by_hand() -> None:
    # a, two temporal patches 1.5 positions apart of 1 row x 2 columns, b
    positions, delta = rope_index(
        torch.tensor([False, *[True] * 6, False]),
        torch.tensor([[3, 2, 4]]),
        torch.tensor([1.5]),
        2,
    )
    assert positions.tolist() == [
        [0, 1, 1, 2, 2, 4, 4, 3],
        [0, 1, 1, 1, 1, 1, 1, 3],
        [0, 1, 2, 1, 2, 1, 2, 3],
    ]
    assert delta == 5 - 8


def test_rows_that_do_not_match_the_grid_are_our_bug() -> None:
    with pytest.raises(AssertionError, match="2 visual rows for grids of 1"):
        rope_index(torch.tensor([True, True, False]), torch.tensor([[1, 2, 2]]), torch.zeros(1), 2)
