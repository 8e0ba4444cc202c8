"""Products of bytes, and the rows that are made bytes for them, against their definitions."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.plugins.overlap import check_overlap
from tests.plugins.test_linear import TOLERANCE, worst_error
from trt_eagle3.engine import capi
from trt_eagle3.engine.capi import RowCodes
from trt_eagle3.engine.torch.packing import pack_fp8, pack_int8, packed_columns

pytestmark = pytest.mark.gpu

SHAPES = [(16, 128), (112, 384), (336, 2560), (6144, 4096), (4096, 12288)]  # N, K
WIDTHS = [(1, 128), (5, 384), (300, 4096), (3, 12288), (2, 14336)]  # M, K
ROWS = (1, 7, 64, 65, 128, 129, 256, 300)
# The chip adds products of e4m3 in about 14 bits: 2e-3 to 3.6e-3 were seen with K of 4096 and
# 12288, 1.7e-3 of them the rounding to bfloat16, and of the worst value 5e-2, which counts an
# eighth (docs/measurements.md).
FP8_TOLERANCE = 2 * TOLERANCE[torch.bfloat16]


def plain(q: Tensor) -> Tensor:
    """float64, columns in their own order."""
    return q.double()[:, packed_columns(q.shape[1]).argsort().to(q.device)]


def draw(kind: str, n: int, k: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes, scales, and values in float64."""
    scale = torch.rand(n, 1, device=device) * 0.02 + 1e-3
    if kind == "int8":
        codes = torch.randint(0, 256, (n, k), device=device, dtype=torch.uint8)
        return pack_int8(codes), scale, (codes.double() - 128) * scale.double()
    codes = (torch.randn(n, k, device=device) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return pack_fp8(codes), scale, codes.double() * scale.double()


def draw_rows(kind: str, rows: int, k: int, device: torch.device) -> tuple[RowCodes, Tensor]:
    """Bytes of drawn rows, and the values that they stand for in float64."""
    x = torch.randn(rows, k, device=device).bfloat16()
    codes = capi.quantise_rows(x, integers=kind == "int8")
    return codes, plain(codes.q) * codes.scale[0].double()[:, None]


def multiply(
    codes: RowCodes, weight: Tensor, scale: Tensor, dtype: torch.dtype, *, safe: bool = True
) -> Tensor:
    out = torch.full((len(codes.q), len(weight)), torch.nan, device=weight.device, dtype=dtype)
    try:
        return capi.linear_w8a8(*codes, weight, scale, dtype, prefetch_safe=safe, out=out)
    except NotImplementedError:
        pytest.skip("no products of bytes on this chip")


def tolerance(kind: str, dtype: torch.dtype) -> float:
    return TOLERANCE[dtype] if kind == "int8" else max(FP8_TOLERANCE, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_products_of_bytes_match_float64(
    kind: str, shape: tuple[int, int], dtype: torch.dtype, cuda: torch.device
) -> None:
    weight, scale, values = draw(kind, *shape, cuda)
    for rows in ROWS:
        codes, x = draw_rows(kind, rows, shape[1], cuda)
        for safe in (False, True):
            error = worst_error(multiply(codes, weight, scale, dtype, safe=safe), x @ values.T)
            assert error < tolerance(kind, dtype), f"{rows} rows: {error:.2e}"


def test_products_of_whole_numbers_do_not_depend_on_how_many_rows_there_are(
    cuda: torch.device,
) -> None:
    weight, scale, _ = draw("int8", 1024, 4096, cuda)
    codes, _ = draw_rows("int8", 300, 4096, cuda)
    many = multiply(codes, weight, scale, torch.bfloat16)
    for rows in (1, 9, 64, 128, 256):
        few = RowCodes(codes.q[:rows], codes.scale[:, :rows].contiguous())
        assert torch.equal(multiply(few, weight, scale, torch.bfloat16), many[:rows])


def test_products_of_bytes_give_the_same_bits_on_ten_runs(cuda: torch.device) -> None:
    weight, scale, _ = draw("fp8", 4096, 12288, cuda)
    for rows in (64, 128, 256):
        codes, _ = draw_rows("fp8", rows, 12288, cuda)
        first = multiply(codes, weight, scale, torch.bfloat16)
        for _ in range(9):
            assert torch.equal(multiply(codes, weight, scale, torch.bfloat16), first)


@pytest.mark.parametrize("rows", [6, 100, 200])
def test_a_chain_of_products_of_bytes_that_overlap_gives_what_one_by_one_gives(
    rows: int, cuda: torch.device
) -> None:
    x = torch.randn(rows, 4096, device=cuda).bfloat16()
    weights = [draw("fp8", 4096, 4096, cuda)[0] for _ in range(12)]
    scale = torch.full((4096, 1), 4096**-0.5 / 100, device=cuda)
    torch.cuda.synchronize()

    def step(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        codes = capi.quantise_rows(x)
        return capi.linear_w8a8(*codes, weight, scale, x.dtype, prefetch_safe=True, out=out)

    try:
        check_overlap(x, [partial(step, weight=weight) for weight in weights])
    except NotImplementedError:
        pytest.skip("no products of bytes on this chip")


@pytest.mark.parametrize(
    "fault", ["scales of other rows", "scales of another token", "a row of weights", "a token"]
)
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_planted_fault_is_caught(kind: str, fault: str, cuda: torch.device) -> None:
    weight, scale, values = draw(kind, 512, 1024, cuda)
    codes, x = draw_rows(kind, 100, 1024, cuda)
    if fault == "scales of other rows":
        values[:128], values[128:256] = values[128:256].clone(), values[:128].clone()
    elif fault == "scales of another token":
        codes.scale[0, :2] *= torch.tensor([1.3, 0.7], device=cuda)
    elif fault == "a row of weights":
        values[3] += 0.5 * values[3].norm() / 32
    elif kind == "int8":
        codes.scale[1, 5] += 256  # the sum that the zero point takes
    else:
        codes.q.view(torch.uint8)[5] ^= 0x80
    got = multiply(codes, weight, scale, torch.bfloat16)
    assert not worst_error(got, x @ values.T) < 2 * tolerance(kind, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape", [(1, 128), (5, 384), (300, 4096), (3, 12288), (2, 14336)], ids=str
)
def test_whole_rows_are_their_definition(
    shape: tuple[int, int], dtype: torch.dtype, cuda: torch.device
) -> None:
    x = torch.randn(shape, device=cuda).to(dtype)
    x[0, :128] = 0
    codes = capi.quantise_rows(x, integers=True)
    most, largest = x.float().abs().amax(-1), torch.full((len(x),), 127.0, device=cuda)
    one = torch.ones_like(most)
    factor = torch.where(most > 1e-30, largest / most, one)
    expected = (x.float() * factor[:, None]).round()
    assert torch.equal(plain(codes.q), expected.double())
    assert torch.equal(codes.scale[0], torch.where(most > 1e-30, most / largest, one))
    assert torch.equal(codes.scale[1].double(), expected.double().sum(-1))


KINDS = {"row": {}, "blocks": {"blocks": True}, "integers": {"integers": True}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape", [(1, 128), (5, 384), (300, 4096), (3, 12288), (2, 14336)], ids=str
)
def test_rows_of_silu_are_what_silu_mul_and_quantise_rows_make(
    kind: str, shape: tuple[int, int], cuda: torch.device
) -> None:
    gate_up = torch.randn(shape[0], 2 * shape[1], device=cuda).bfloat16()
    got = capi.quantise_silu_mul(gate_up, **KINDS[kind])
    check_same(got, capi.quantise_rows(capi.silu_mul(gate_up), **KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(1, 128), (5, 384), (300, 4096), (3, 8192)], ids=str)
def test_rows_of_a_norm_are_what_add_rms_norm_and_quantise_rows_make(
    residual: bool, kind: str, shape: tuple[int, int], cuda: torch.device
) -> None:
    x, other = (torch.randn(shape, device=cuda).bfloat16() for _ in range(2))
    weight = torch.rand(shape[1], device=cuda).bfloat16()
    before = other if residual else None
    got, total = capi.quantise_add_rms_norm(x, weight, before, epsilon=1e-6, **KINDS[kind])
    normed, expected = capi.add_rms_norm(x, weight, before, epsilon=1e-6)
    check_same(got, capi.quantise_rows(normed, **KINDS[kind]))
    if residual:
        assert total is not None
        assert expected is not None
        assert torch.equal(total, expected)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("shape", [(1, 128), (5, 384), (8, 4096)], ids=str)
def test_rounded_rows_of_silu_and_norm_are_those_that_round_rows_makes(
    shape: tuple[int, int], blocks: bool, cuda: torch.device
) -> None:
    x, up, other = (torch.randn(shape, device=cuda).bfloat16() for _ in range(3))
    gate_up = torch.cat([x, up], 1)
    expected = capi.round_rows(capi.silu_mul(gate_up), blocks=blocks)
    assert torch.equal(capi.round_silu_mul(gate_up, blocks=blocks), expected)
    normed, total = capi.add_rms_norm(x, up[0], other, epsilon=1e-6)
    rounded, found = capi.round_add_rms_norm(x, up[0], other, epsilon=1e-6, blocks=blocks)
    assert torch.equal(rounded, capi.round_rows(normed, blocks=blocks))
    assert found is not None
    assert total is not None
    assert torch.equal(found, total)


def check_same(got: RowCodes, expected: RowCodes) -> None:
    assert torch.equal(got.q.view(torch.uint8), expected.q.view(torch.uint8))
    assert torch.equal(got.scale, expected.scale)


def test_a_norm_of_very_wide_rows_says_that_it_is_not_computed(cuda: torch.device) -> None:
    x = torch.zeros(1, 8320, device=cuda).bfloat16()
    with pytest.raises(NotImplementedError):
        capi.quantise_add_rms_norm(x, x[0], epsilon=1e-6)
