"""A layer's dense products in one launch against their definition in float64, and against the
single kernels.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.plugins.dense_layer_case import (
    KINDS,
    LayerCase,
    draw_layer,
    reference,
    worst_difference,
)
from tests.plugins.overlap import check_overlap
from trt_eagle3.engine import capi
from trt_eagle3.engine.torch.packed import Int4Weight

pytestmark = pytest.mark.gpu

SIZES = [  # A, H, I, N
    (128, 128, 128, 16),  # fewer rows of W than blocks, fewer spans than warps
    (384, 1280, 2176, 528),  # a half tile, segments that end halfway
    (1024, 2048, 6144, 3072),
    (4096, 4096, 12288, 6144),
    (4096, 2560, 9728, 6144),
]
NAMES = ("middle", "inner", "total", "y")
# gate, up and their product, each rounded the other way: an ulp of each
TOLERANCE = {torch.bfloat16: 3 * 2**-8, torch.float16: 3 * 2**-11}


def run(case: LayerCase, x: Tensor, residual: Tensor, **how: bool | int) -> tuple[Tensor, ...]:
    try:
        return case.run(x, residual, **how)
    except NotImplementedError:
        pytest.skip("no kernel on this chip")


def check(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    for name, y, expected in zip(NAMES, got, wanted, strict=False):
        error = worst_difference(y, expected)
        assert error < TOLERANCE[dtype], f"{name}: {error:.2e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_dense_layer_matches_float64(
    kind: str, sizes: tuple[int, ...], dtype: torch.dtype, cuda: torch.device
) -> None:
    case = draw_layer(kind, sizes, dtype, cuda)
    for rows in (1, 2, 5, 8, 9, 16):
        x, residual = case.rows(rows, seed=rows)
        for has_next, prefetch_safe in ((True, True), (True, False), (False, True)):
            got = run(case, x, residual, has_next=has_next, prefetch_safe=prefetch_safe)
            check(got, reference(x, residual, case, got), dtype)


@pytest.mark.parametrize("kind", ["int4", "fp8 channel"])
def test_dense_layer_matches_the_single_kernels(kind: str, cuda: torch.device) -> None:
    case = draw_layer(kind, (4096, 4096, 12288, 6144), torch.bfloat16, cuda)
    o, gate_up, down, qkv = case.weights
    for rows in (1, 4, 16):
        x, residual = case.rows(rows)
        norm = partial(capi.add_rms_norm, epsilon=1e-6, weight_offset=0.25)
        got = run(case, x, residual)
        _, middle = norm(o.linear(x), case.norms[0], residual)
        inner = capi.silu_mul(gate_up.linear(norm(got[0], case.norms[0])[0]))
        _, total = norm(down.linear(got[1]), case.norms[1], got[0])
        y = qkv.linear(norm(got[2], case.norms[1])[0])
        assert middle is not None
        assert total is not None
        singles = tuple(t.double() for t in (middle, inner, total, y))
        check(got, singles, torch.bfloat16)


@pytest.mark.parametrize("sizes", [SIZES[1], SIZES[3]], ids=str)
@pytest.mark.parametrize("kind", ["int4 zeros", "fp8 channel", "fp8 block"])
def test_a_row_gives_the_same_bits_alone_and_among_others(
    kind: str, sizes: tuple[int, ...], cuda: torch.device
) -> None:
    case = draw_layer(kind, sizes, torch.bfloat16, cuda)
    x, residual = case.rows(16)
    together = run(case, x, residual)
    for rows in range(1, 16):
        few = run(case, x[:rows].contiguous(), residual[:rows].contiguous())
        for name, a, b in zip(NAMES, few, together, strict=True):
            assert torch.equal(a, b[:rows]), f"{rows} rows: {name}"
    last = run(case, x[15:].contiguous(), residual[15:].contiguous())
    assert all(torch.equal(a, b[15:]) for a, b in zip(last, together, strict=True))


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_shorter_rings_give_the_same_bits(slots: int, cuda: torch.device) -> None:
    for kind in ("int4", "fp8 channel"):
        case = draw_layer(kind, SIZES[2], torch.bfloat16, cuda)
        for rows in (3, 11):
            x, residual = case.rows(rows)
            wanted = run(case, x, residual)
            got = run(case, x, residual, slots=slots)
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("fault", ["shuffled scales", "a norm", "rows of another token"])
@pytest.mark.parametrize("kind", ["int4", "fp8 channel"])
def test_planted_fault_is_caught(kind: str, fault: str, cuda: torch.device) -> None:
    case = draw_layer(kind, SIZES[2], torch.bfloat16, cuda)
    x, residual = case.rows(8)
    got = run(case, x, residual)
    other = case
    if fault == "shuffled scales":
        values = case.values[1].clone()
        values[:16], values[16:32] = case.values[1][16:32], case.values[1][:16]
        other = replace(case, values=(case.values[0], values, *case.values[2:]))
    elif fault == "a norm":
        other = replace(case, norms=(case.norms[1], case.norms[0]))
    else:
        x = x.roll(1, 0)
    wanted = reference(x, residual, other, got)
    errors = map(worst_difference, got, wanted)
    assert max(errors) > 10 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_a_thousand_replays_of_a_chain_give_the_same_bits(rows: int, cuda: torch.device) -> None:
    """Layers that follow one another with the same barrier, each reading what the last wrote."""
    first = draw_layer("int4 zeros", (2048, 2048, 6144, 2048), torch.bfloat16, cuda)
    x, residual = first.rows(rows)
    run(first, x, residual)

    def chain() -> Tensor:
        y, stream = x, residual
        for _ in range(4):
            _, _, stream, y = first.run(y, stream)
        return y

    wanted = chain().clone()
    assert bool(wanted.isfinite().all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain()
    for _ in range(1000):
        got.fill_(torch.nan)
        graph.replay()
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("rows", [1, 7, 13])
def test_launches_that_overlap_give_what_one_by_one_gives(rows: int, cuda: torch.device) -> None:
    """Beside single products before and after it."""
    case = draw_layer("fp8 channel", (2048, 2048, 6144, 2048), torch.bfloat16, cuda)
    x, residual = case.rows(rows)
    run(case, x, residual)
    o = case.weights[0]
    launches = [o.linear, lambda y: case.run(y, residual)[3]] * 3
    check_overlap(x, launches)


def test_rows_or_sizes_that_do_not_fit_are_refused(cuda: torch.device) -> None:
    case = draw_layer("int4", SIZES[1], torch.bfloat16, cuda)
    run(case, *case.rows(16))
    for refused, rows in (
        (case, 17),
        (draw_layer("int4", (256, 8448, 128, 16), torch.bfloat16, cuda), 1),
        (draw_layer("int4", (256, 8192, 128, 16), torch.bfloat16, cuda), 16),
    ):
        with pytest.raises(NotImplementedError):
            refused.run(*refused.rows(rows))


def test_groups_of_other_sizes_are_refused(cuda: torch.device) -> None:
    case = draw_layer("int4", SIZES[1], torch.bfloat16, cuda)
    o = case.weights[0]
    assert isinstance(o, Int4Weight)
    fine = Int4Weight(o.codes, o.scale.repeat_interleave(2, 1), None)
    with pytest.raises(ValueError, match="o_scale"):
        replace(case, weights=(fine, *case.weights[1:])).run(*case.rows(1))
