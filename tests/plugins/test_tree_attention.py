"""TreeAttention against its definition in float64, over sizes that break tilings."""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.plugins.overlap import check_overlap
from tests.plugins.tree_case import Case, Inputs, check_rows, draw, expected_cache, reference, run
from trt_eagle3.engine import capi
from trt_eagle3.engine.capi import AttentionPath

pytestmark = pytest.mark.gpu

# ||out - reference|| / ||reference||. Half precision: one rounding of the weights and one of the
# output, each of relative size 2^-9 (bfloat16) or 2^-12 (float16), uniformly spread; float32: a
# thousand additions.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}

CASES = [
    Case(lengths=((0, 1),), num_new=1, tail=1),  # the first token of all
    Case(lengths=((1, 1),), num_new=1, tail=1),
    Case(lengths=((63, 1),), num_new=1, tail=1),  # fills a tile exactly
    Case(lengths=((64, 1),), num_new=1, tail=1),
    Case(lengths=((4095, 1),), num_new=1, tail=1, heads=(32, 8)),
    Case(lengths=((0, 16),), num_new=16, tail=16),  # an empty past
    Case(lengths=((15, 2),), num_new=2, tail=2),  # a new token on each side of a page boundary
    Case(lengths=((127, 16),), num_new=16, tail=16, page_size=1),
    Case(lengths=((1000, 16),), num_new=16, tail=16, heads=(32, 8), page_size=64),
    Case(lengths=((777, 64),), num_new=64, tail=64, heads=(32, 8)),
    Case(lengths=((777, 128),), num_new=128, tail=128, heads=(16, 1), page_size=32),
    # a later level of a tree: earlier levels with holes
    Case(lengths=((100, 8),), num_new=8, tail=27),
    Case(lengths=((100, 3),), num_new=4, tail=77),
    Case(lengths=((300, 12),), num_new=16, tail=40, heads=(7, 1)),
    Case(lengths=((300, 9),), num_new=16, tail=16, heads=(28, 4)),
    Case(lengths=((50, 5),), num_new=5, tail=5, heads=(10, 2)),
    # ragged; one sequence has nothing to do
    Case(lengths=((0, 3), (17, 0), (500, 7), (1, 1)), num_new=7, tail=9),
    Case(lengths=((4000, 16), (10, 1), (333, 16)), num_new=16, tail=16, heads=(32, 8)),
    Case(lengths=((40, 70), (2000, 1)), num_new=128, tail=128, heads=(14, 2)),
    Case(lengths=((129, 6),), num_new=6, tail=6, heads=(4, 4)),
    Case(lengths=((129, 33),), num_new=33, tail=33, heads=(5, 1), head_dim=64),
    Case(lengths=((70, 2),), num_new=2, tail=2, head_dim=64),
    Case(lengths=((700, 64),), num_new=64, tail=64, head_dim=64),
    Case(lengths=((129, 3),), num_new=3, tail=5, head_dim=96),
    Case(lengths=((1029, 33),), num_new=33, tail=33, head_dim=96),
    Case(lengths=((129, 3),), num_new=3, tail=5, head_dim=256),
    Case(lengths=((129, 13),), num_new=13, tail=15, head_dim=256),
    Case(lengths=((1029, 40),), num_new=40, tail=40, head_dim=256),
    Case(lengths=((0, 1),), num_new=1, tail=1, causal=True),
    Case(lengths=((0, 300),), num_new=300, tail=300, causal=True),
    Case(lengths=((513, 257),), num_new=257, tail=257, causal=True, heads=(7, 1), page_size=64),
    Case(lengths=((0, 200), (64, 131), (9, 0)), num_new=200, tail=203, causal=True),
    Case(lengths=((31, 190),), num_new=190, tail=190, causal=True, head_dim=64),
    Case(lengths=((31, 190),), num_new=190, tail=190, causal=True, head_dim=96),
    Case(lengths=((31, 190),), num_new=190, tail=190, causal=True, head_dim=256),
]
# windows: within the tail, over a tile's edge, wider than the past; all of a block's rows alike
CASES += [
    Case(lengths=((700, 8), (3, 8)), num_new=8, tail=8, window=1),
    Case(lengths=((700, 8), (3, 5)), num_new=8, tail=8, window=4),
    Case(lengths=((4000, 8), (63, 8), (0, 8)), num_new=8, tail=8, heads=(32, 8), window=65),
    Case(lengths=((4000, 16), (10, 16)), num_new=16, tail=16, heads=(32, 8), window=2048),
    Case(lengths=((1029, 33),), num_new=33, tail=40, window=300),
    Case(lengths=((513, 190),), num_new=190, tail=190, causal=True, window=70),
    Case(lengths=((700, 8), (3, 5)), num_new=8, tail=8, anchor_window=1),
    Case(lengths=((4000, 8), (63, 8)), num_new=8, tail=8, heads=(32, 8), anchor_window=65),
    Case(lengths=((1029, 64),), num_new=64, tail=64, heads=(16, 1), anchor_window=300),
    Case(lengths=((700, 8),), num_new=8, tail=8, head_dim=64, window=100),
    Case(lengths=((700, 8),), num_new=8, tail=8, head_dim=96, window=100),
    Case(lengths=((700, 8),), num_new=8, tail=8, head_dim=256, anchor_window=100),
]
PLAIN = [
    Case(lengths=((0, 1), (37, 1)), num_new=1, tail=1, head_dim=16),
    Case(lengths=((37, 6), (0, 2)), num_new=6, tail=11, head_dim=32, heads=(6, 3)),
    Case(lengths=((37, 60),), num_new=60, tail=60, head_dim=80, causal=True),
    Case(lengths=((400, 16),), num_new=16, tail=16, head_dim=128, heads=(7, 1)),
    Case(lengths=((90, 6), (0, 2)), num_new=6, tail=11, head_dim=32, heads=(6, 3), window=5),
    Case(lengths=((90, 6),), num_new=6, tail=6, head_dim=80, anchor_window=33),
]


# Many new tokens, as a prompt's chunks have them.
PROMPTS = [
    Case(lengths=((0, 700),), num_new=700, tail=700, heads=(32, 8), chunk=True),
    Case(lengths=((2049, 1025),), num_new=1025, tail=1025, heads=(32, 8), chunk=True),
    Case(lengths=((5, 1024),), num_new=1024, tail=1024, heads=(32, 8), page_size=1, causal=True),
    Case(lengths=((300, 640),), num_new=640, tail=640, heads=(28, 4), page_size=24, chunk=True),
    Case(lengths=((77, 900),), num_new=900, tail=900, heads=(16, 16), page_size=64, chunk=True),
    Case(lengths=((0, 600),), num_new=600, tail=600, heads=(64, 2), chunk=True),
    # ragged: one fills the chunk, one ends within it, one has a single row, one has none
    Case(
        lengths=((0, 512), (333, 200), (40, 1), (9, 0)),
        num_new=512,
        tail=512,
        heads=(32, 8),
        chunk=True,
    ),
    Case(lengths=((31, 300), (0, 257)), num_new=300, tail=310, heads=(32, 8), causal=True),
    # masks that are no prompt's: every row asks its own
    Case(lengths=((130, 300),), num_new=300, tail=333, heads=(32, 8)),
    Case(lengths=((0, 260), (700, 31)), num_new=260, tail=260, heads=(7, 1)),
]


def check(case: Case, device: torch.device, **options: object) -> None:
    x = draw(case, seed=zlib.crc32(str(case).encode()), device=device)
    wanted_k, wanted_v = expected_cache(case, x)
    wanted = reference(case, x)
    out = torch.full_like(x.q, torch.nan)
    torch.cuda.synchronize()  # the cache is settled
    try:
        run(case, x, out, **options)
    except NotImplementedError:
        pytest.skip("no such path on this chip")
    integers = torch.int32 if case.dtype == torch.float32 else torch.int16
    assert torch.equal(x.k_cache.view(integers), wanted_k.view(integers))
    assert torch.equal(x.v_cache.view(integers), wanted_v.view(integers))
    check_rows(case, out, wanted, TOLERANCE[case.dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("prefetch_safe", [False, True])
def test_tree_attention_matches_float64(
    case: Case, dtype: torch.dtype, prefetch_safe: bool, cuda: torch.device
) -> None:
    check(case.of(dtype), cuda, prefetch_safe=prefetch_safe)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("prefetch_safe", [False, True])
@pytest.mark.parametrize("num_new", [1, 3, 4])
def test_tree_attention_of_a_crowd_matches_float64(
    num_new: int, prefetch_safe: bool, dtype: torch.dtype, cuda: torch.device
) -> None:
    """Work for more than two blocks on every multiprocessor; some sequences are padding."""
    lengths = tuple((53 * i % 900, i % (num_new + 1)) for i in range(40))
    case = Case(lengths=lengths, num_new=num_new, tail=num_new + 2, heads=(32, 8), page_size=16)
    check(case.of(dtype), cuda, prefetch_safe=prefetch_safe)


@pytest.mark.parametrize("case", CASES + PLAIN, ids=str)
def test_tree_attention_in_float32_matches_float64(case: Case, cuda: torch.device) -> None:
    check(case.of(torch.float32), cuda)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_tree_attention_of_an_odd_geometry_matches_float64(case: Case, cuda: torch.device) -> None:
    check(case, cuda)


@pytest.mark.parametrize("num_splits", [1, 2, 16, 64])
@pytest.mark.parametrize("path", [AttentionPath.MMA, AttentionPath.WGMMA])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tree_attention_on_every_path_matches_float64(
    case: Case, path: AttentionPath, num_splits: int, cuda: torch.device
) -> None:
    check(case, cuda, path=path, num_splits=num_splits, prefetch_safe=True)


@pytest.mark.parametrize("path", [AttentionPath.AUTO, AttentionPath.WGMMA, AttentionPath.PROMPT])
@pytest.mark.parametrize("case", PROMPTS, ids=str)
def test_tree_attention_of_prompts_matches_float64(
    case: Case, path: AttentionPath, cuda: torch.device
) -> None:
    check(case, cuda, path=path, prefetch_safe=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tree_attention_on_the_path_of_prompts_matches_float64(
    case: Case, dtype: torch.dtype, cuda: torch.device
) -> None:
    check(case.of(dtype), cuda, path=AttentionPath.PROMPT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("path", AttentionPath)
def test_tree_attention_segments_of_a_prompt_see_those_before_them(
    path: AttentionPath, dtype: torch.dtype, cuda: torch.device
) -> None:
    """Three batch rows over the pages of one sequence, in one launch; the last has padding."""
    past, width, total = 70, 300, 850
    case = Case(
        lengths=((past, total),), num_new=3 * width, tail=3 * width, heads=(32, 8), chunk=True
    ).of(dtype)
    x = draw(case, seed=1, device=cuda)
    wanted, caches = reference(case, x), expected_cache(case, x)
    starts = torch.arange(3, dtype=torch.int32, device=cuda) * width
    out = torch.full_like(x.q, torch.nan)
    try:
        capi.tree_attention(
            x.q, x.k, x.v, x.k_cache, x.v_cache, past + starts, (total - starts).clamp(max=width),
            x.page_table.expand(3, -1).contiguous(),
            torch.ones(3, width, width, dtype=torch.bool, device=cuda).tril(),
            page_size=case.page_size, scale=x.scale, out=out, path=path,
        )  # fmt: skip
    except NotImplementedError:
        pytest.skip("no such path for this type")
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    for cache, expected in zip((x.k_cache, x.v_cache), caches, strict=True):
        assert torch.equal(cache.view(integers), expected.view(integers))
    error = (out.view(wanted.shape).double() - wanted).norm() / wanted.norm()
    assert error < TOLERANCE[dtype], f"{error:.2e}"


@pytest.mark.parametrize("num_new", [1, 16, 64])
def test_tree_attention_gives_the_same_bits_on_ten_runs(num_new: int, cuda: torch.device) -> None:
    case = Case(lengths=((3000, num_new),), num_new=num_new, tail=num_new, heads=(32, 8))
    x = draw(case, seed=num_new, device=cuda)
    first = run(case, x, torch.empty_like(x.q)).clone()
    for _ in range(9):
        assert torch.equal(run(case, x, torch.full_like(x.q, torch.nan)), first)


def test_tree_attention_may_be_captured_in_a_graph(cuda: torch.device) -> None:
    case = Case(lengths=((500, 16),), num_new=16, tail=16, heads=(32, 8))
    x = draw(case, seed=0, device=cuda)
    eager = run(case, x, torch.empty_like(x.q)).clone()
    out = torch.full_like(x.q, torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(case, x, out)
    graph.replay()
    assert torch.equal(out, eager)


@pytest.mark.parametrize("num_new", [1, 16, 64])
def test_layers_that_overlap_give_what_one_by_one_gives(num_new: int, cuda: torch.device) -> None:
    """As in a decoder: each layer reads what the one before writes, and its own settled cache
    early.
    """
    case = Case(lengths=((1500, num_new),), num_new=num_new, tail=num_new, heads=(32, 8))
    layers = [draw(case, seed=layer, device=cuda) for layer in range(8)]
    torch.cuda.synchronize()

    def launch(x: Inputs, q: Tensor) -> Tensor:
        return run(case, replace(x, q=q), torch.empty_like(q), prefetch_safe=True)

    check_overlap(layers[0].q, [partial(launch, x) for x in layers])
