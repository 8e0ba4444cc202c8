"""Products with quantised weights against their definition in float64, over sizes that break
tilings.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.plugins.overlap import check_overlap
from tests.plugins.packed_case import KINDS, PackedCase, draw_weight
from tests.plugins.test_linear import TOLERANCE, worst_error
from trt_eagle3.engine import capi
from trt_eagle3.engine.torch.packed import Fp8Weight, Int4Weight
from trt_eagle3.engine.torch.packing import pack_fp8, pack_int4, packed_columns

pytestmark = pytest.mark.gpu

SHAPES = [  # N, K
    (16, 128),
    (48, 256),  # fewer rows than a tile
    (112, 384),  # fewer spans than warps
    (336, 2560),
    (6144, 4096),
    (4096, 12288),
    (9008, 4096),
]


def draw_x(rows: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(rows, k, device=device).to(dtype)


def run(case: PackedCase, x: Tensor, *, prefetch_safe: bool = True) -> Tensor:
    out = torch.full((len(x), len(case.values)), torch.nan, device=x.device, dtype=x.dtype)
    try:
        return case.linear(x, out, prefetch_safe)
    except NotImplementedError:
        pytest.skip("no kernel for these sizes on this chip")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_linear_matches_float64(
    kind: str, shape: tuple[int, int], dtype: torch.dtype, cuda: torch.device
) -> None:
    case = draw_weight(kind, *shape, cuda)
    for rows in (1, 2, 8, 9, 16, 17, 33, 64, 65, 128):
        x = draw_x(rows, shape[1], dtype, cuda)
        reference = x.double() @ case.values.T
        for prefetch_safe in (False, True):
            error = worst_error(run(case, x, prefetch_safe=prefetch_safe), reference)
            assert error < TOLERANCE[dtype], f"{rows} rows: {error:.2e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(48, 256), (336, 2560)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_unpack_rounds_code_times_scale_once(
    kind: str, shape: tuple[int, int], dtype: torch.dtype, cuda: torch.device
) -> None:
    case = draw_weight(kind, *shape, cuda)
    got = case.unpack(torch.full(shape, torch.nan, device=cuda, dtype=dtype))
    assert torch.equal(got, case.values.float().to(dtype))


@pytest.mark.parametrize("fault", ["scales of other rows", "x of another token", "a code"])
@pytest.mark.parametrize("kind", ["fp8 block", "int4 128 zeros"])
def test_planted_fault_is_caught(kind: str, fault: str, cuda: torch.device) -> None:
    case = draw_weight(kind, 512, 1024, cuda)
    x = draw_x(8, 1024, torch.bfloat16, cuda)
    got, values, other = run(case, x), case.values.clone(), x.clone()
    if fault == "scales of other rows":
        values[:128], values[128:256] = case.values[128:256], case.values[:128]
    elif fault == "x of another token":
        other[[0, 1]] = other[[1, 0]]
    else:
        got[3, 100] += 0.05 * got[3].norm()
    assert not worst_error(got, other.double() @ values.T) < 10 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("kind", ["fp8 channel", "fp8 block", "int4 32 zeros float16"])
def test_product_of_a_token_does_not_depend_on_the_others(kind: str, cuda: torch.device) -> None:
    for shape, most, fewer in (
        ((6144, 4096), 8, (1, 3)),
        ((6144, 4096), 16, (9, 12)),
        ((4096, 12288), 16, (9, 12)),
        ((4096, 12288), 64, (17, 33)),
    ):
        case, x = (
            draw_weight(kind, *shape, cuda),
            draw_x(most, shape[1], torch.bfloat16, cuda),
        )
        together = run(case, x)
        for rows in fewer:
            assert torch.equal(run(case, x[:rows].contiguous()), together[:rows])


@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("kind", ["fp8 channel", "int8 channel", "int4 64 zeros", "int4 128"])
def test_packed_linear_takes_x_of_any_size(kind: str, size: float, cuda: torch.device) -> None:
    """A bfloat16 x is multiplied as half, by powers of two for each 128 columns."""
    case = draw_weight(kind, 336, 2560, cuda)
    x = draw_x(12, 2560, torch.float32, cuda) * torch.logspace(-6, 0, 2560, device=cuda)
    x = (x * size).to(torch.bfloat16)
    for rows in (3, 12):
        error = worst_error(run(case, x[:rows]), x[:rows].double() @ case.values.T)
        assert error < TOLERANCE[torch.bfloat16], f"{rows} rows: {error:.2e}"


@pytest.mark.parametrize("rows", [6, 16, 64])
def test_packed_linear_gives_the_same_bits_on_ten_runs(rows: int, cuda: torch.device) -> None:
    case = draw_weight("int4 64 zeros", 4096, 12288, cuda)
    x = draw_x(rows, 12288, torch.bfloat16, cuda)
    first = run(case, x)
    for _ in range(9):
        assert torch.equal(run(case, x), first)


@pytest.mark.parametrize("rows", [6, 12, 33])
def test_a_chain_of_launches_that_overlap_gives_what_one_by_one_gives(
    rows: int, cuda: torch.device
) -> None:
    """Each launch reads what the one before writes, and its own settled weight early."""
    x = draw_x(rows, 4096, torch.bfloat16, cuda)
    codes = [torch.randn(4096, 4096, device=cuda).to(torch.float8_e4m3fn) for _ in range(12)]
    weights = [pack_fp8(code) for code in codes]
    scale = torch.full((4096, 1), 4096**-0.5, device=cuda)
    torch.cuda.synchronize()
    check_overlap(
        x,
        [partial(capi.linear_fp8, weight=w, scale=scale, prefetch_safe=True) for w in weights],
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 128), (5, 384), (300, 4096), (3, 12288)], ids=str)
@pytest.mark.parametrize("blocks", [False, True])
def test_quantise_rows_is_its_definition(
    blocks: bool, shape: tuple[int, int], dtype: torch.dtype, cuda: torch.device
) -> None:
    rows, k = shape
    x = draw_x(rows, k, dtype, cuda) * torch.logspace(-3, 3, rows, device=cuda)[:, None].to(dtype)
    x[0, :128] = 0
    x[-1, -128:] *= 1e-38
    q, scale = capi.quantise_rows(x, blocks=blocks)

    parts = x.float().unflatten(1, (-1, 128 if blocks else k))
    most = parts.abs().amax(-1, keepdim=True)
    one, largest = torch.ones_like(most), torch.full_like(most, 448)  # a number divides otherwise
    expected = torch.where(most > 1e-30, most / largest, one)
    factor = torch.where(most > 1e-30, largest / most, one)
    codes = (parts * factor).to(torch.float8_e4m3fn).flatten(1)

    assert torch.equal(scale, expected[..., 0].T)
    order = packed_columns(k).to(cuda)
    assert torch.equal(q.view(torch.uint8), codes.view(torch.uint8)[:, order])
    rounded = capi.round_rows(x, blocks=blocks)
    assert torch.equal(rounded, (codes.float().view_as(parts) * expected).flatten(1).to(dtype))


@pytest.mark.parametrize("rows", [65, 100, 300])
@pytest.mark.parametrize("blocks", [False, True])
def test_many_rows_of_an_fp8_weight_are_products_of_quantised_rows(
    blocks: bool, rows: int, cuda: torch.device
) -> None:
    n, k = 512, 1024
    codes = torch.randn(n, k, device=cuda).to(torch.float8_e4m3fn)
    scale = torch.rand((4, 8) if blocks else (n, 1), device=cuda) + 0.1
    x = draw_x(rows, k, torch.bfloat16, cuda)
    y = Fp8Weight(pack_fp8(codes), scale, fp8_activations=True).linear(x)

    q, by_row = capi.quantise_rows(x, blocks=blocks)
    x_codes = q.double()[:, packed_columns(k).argsort().to(cuda)]
    x_values = x_codes * by_row.T.double().repeat_interleave(k // len(by_row), 1)
    wide = scale.double().repeat_interleave(128, 0) if blocks else scale.double()
    values = codes.double() * wide.repeat_interleave(128, 1) if blocks else codes.double() * wide
    # FP8 products add in fewer bits than float32
    assert worst_error(y, x_values @ values.T) < 2 * TOLERANCE[torch.bfloat16]
    assert worst_error(y, x.double() @ values.T) < 0.05  # e4m3 has four bits


@pytest.mark.parametrize("blocks", [False, True])
def test_fp8_activations_of_few_rows_are_those_of_many(blocks: bool, cuda: torch.device) -> None:
    """A row's numbers do not depend on how many rows there are; only the order of sums does."""
    codes = torch.randn(1024, 2048, device=cuda).to(torch.float8_e4m3fn)
    scale = torch.rand((8, 16) if blocks else (1024, 1), device=cuda) + 0.1
    weight = Fp8Weight(pack_fp8(codes), scale, fp8_activations=True)
    x = draw_x(80, 2048, torch.bfloat16, cuda)
    many = weight.linear(x).double()
    for rows in (1, 8, 16, 33, 64):
        few = weight.linear(x[:rows].contiguous())
        assert worst_error(few, many[:rows]) < 2 * TOLERANCE[torch.bfloat16], f"{rows} rows"
    unrounded = Fp8Weight(weight.codes, scale).linear(x[:8].contiguous())
    assert worst_error(unrounded, many[:8]) > 5 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("rows", [65, 300])
def test_many_rows_of_an_fp8_weight_alone_are_products_of_its_values(
    rows: int, cuda: torch.device
) -> None:
    codes = torch.randn(512, 1024, device=cuda).to(torch.float8_e4m3fn)
    scale = 2.0 ** torch.randint(-3, 3, (512, 1), device=cuda)
    x = draw_x(rows, 1024, torch.bfloat16, cuda)
    y = Fp8Weight(pack_fp8(codes), scale).linear(x)
    reference = x.double() @ (codes.double() * scale).T
    assert worst_error(y, reference) < 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("rows", [65, 300])
def test_many_rows_of_an_int4_weight_are_products_of_its_values(
    rows: int, cuda: torch.device
) -> None:
    codes = torch.randint(0, 16, (512, 1024), device=cuda, dtype=torch.uint8)
    scale = (torch.rand(512, 8, device=cuda) + 0.1).to(torch.bfloat16)
    weight = Int4Weight(pack_int4(codes), scale, None)
    x = draw_x(rows, 1024, torch.bfloat16, cuda)
    values = (codes.double() - 8) * scale.double().repeat_interleave(128, 1)
    assert worst_error(weight.linear(x), x.double() @ values.T) < 2 * TOLERANCE[torch.bfloat16]


def test_packed_linear_says_what_it_does_not_compute(cuda: torch.device) -> None:
    codes = torch.zeros(16, 128, device=cuda, dtype=torch.uint8)
    weight, scale = (
        pack_int4(codes),
        torch.ones(16, 1, device=cuda, dtype=torch.bfloat16),
    )
    with pytest.raises(NotImplementedError):
        capi.linear_int4(torch.zeros(129, 128, device=cuda, dtype=torch.bfloat16), weight, scale)
    with pytest.raises(NotImplementedError):
        capi.linear_int4(torch.zeros(1, 128, device=cuda), weight, scale)
    with pytest.raises(ValueError, match="x: expected"):
        capi.linear_int4(torch.zeros(1, 256, device=cuda, dtype=torch.bfloat16), weight, scale)
