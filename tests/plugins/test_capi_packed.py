"""What the C library refuses of quantised weights; no GPU needed."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from tests.plugins.capi_calls import (
    ADDRESS,
    BF16,
    F16,
    F32,
    FP8,
    I8,
    I32,
    INVALID,
    U8,
    WRONG_DEVICE,
    args_of,
    status_of,
    tensor,
)


def linear_fp8_args(**changes: Any) -> Any:
    fields = {
        "x": tensor(BF16, 3, 256),
        "weight": tensor(FP8, 304, 256),
        "scale": tensor(F32, 304, 1),
        "y": tensor(BF16, 3, 304, data=2 * ADDRESS),
    }
    return args_of("linear_fp8")(**(fields | changes))


def linear_int4_args(**changes: Any) -> Any:
    fields = {
        "x": tensor(F16, 3, 256),
        "weight": tensor(I32, 304, 32),
        "scale": tensor(BF16, 304, 2),
        "zero_point": tensor(U8, 304, 2),
        "y": tensor(F16, 3, 304, data=2 * ADDRESS),
    }
    return args_of("linear_int4")(**(fields | changes))


@pytest.mark.parametrize(
    "scale", [tensor(F32, *shape) for shape in ((304, 1), (304, 2), (3, 2), (3, 1), (1, 1), (1, 2))]
)
def test_linear_fp8_takes_scales_of_rows_blocks_and_the_whole(
    library: ctypes.CDLL, scale: Any
) -> None:
    args = ctypes.byref(linear_fp8_args(scale=scale))
    assert status_of(library, library.te3_linear_fp8, args, None)[0] == WRONG_DEVICE


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_linear_int4_takes_groups_of_32_to_128_with_zero_points_or_without(
    library: ctypes.CDLL, groups: int
) -> None:
    for zeros in (tensor(U8, 304, groups, data=ADDRESS + 1), tensor(U8, 304, groups, data=None)):
        args = linear_int4_args(scale=tensor(F16, 304, groups), zero_point=zeros)
        status, message = status_of(library, library.te3_linear_int4, ctypes.byref(args), None)
        assert status == WRONG_DEVICE, message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight": tensor(BF16, 304, 256)}, "weight: expected float8_e4m3fn, got bfloat16"),
        ({"weight": tensor(FP8, 304, 192)}, "weight: K must be a positive multiple of 128"),
        ({"weight": tensor(FP8, 300, 256)}, "weight: N must be a multiple of 16, got 300"),
        ({"weight": tensor(FP8, 304, 256, data=ADDRESS + 8)}, "weight: data must be aligned to 16"),
        ({"scale": tensor(BF16, 304, 1)}, "scale: expected float32, got bfloat16"),
        ({"scale": tensor(F32, 2, 2)}, "scale: expected N, ceil(N / 128) or 1 rows"),
        ({"scale": tensor(F32, 2, 304)}, "for weight [304, 256], got [2, 304]"),
        ({"scale": tensor(F32, 304, 1, data=None)}, "scale: data is null"),
        ({"x": tensor(BF16, 3, 128)}, "x: expected [M, K] = [any, 256], got [3, 128]"),
        ({"x": tensor(I32, 3, 256)}, "x: expected float32, float16 or bfloat16, got int32"),
        ({"y": tensor(BF16, 3, 301)}, "y: expected [M, N] = [3, 304], got [3, 301]"),
        ({"y": tensor(BF16, 3, 304)}, "y: must not be x's memory"),
    ],
)
def test_linear_fp8_names_what_is_wrong(
    library: ctypes.CDLL, changes: dict[str, Any], said: str
) -> None:
    args = ctypes.byref(linear_fp8_args(**changes))
    status, message = status_of(library, library.te3_linear_fp8, args, None)
    assert status == INVALID
    assert f"linear_fp8: {said}" in message or said in message


def test_linear_int8_takes_codes_of_a_byte_and_names_what_is_wrong(library: ctypes.CDLL) -> None:
    def said(**changes: Any) -> tuple[int, str]:
        weight = {"weight": tensor(U8, 304, 256), "scale": tensor(F32, 304, 1)}
        product = {"x": tensor(BF16, 3, 256), "y": tensor(BF16, 3, 304, data=2 * ADDRESS)}
        args = args_of("linear_int8")(**{**weight, **product, **changes}, prefetch_safe=0)
        return status_of(library, library.te3_linear_int8, ctypes.byref(args), None)

    assert said()[0] == WRONG_DEVICE
    for weight, text in (
        (tensor(FP8, 304, 256), "weight: expected uint8, got float8_e4m3fn"),
        (tensor(U8, 304, 192), "weight: K must be a positive multiple of 128"),
        (tensor(U8, 304, 256, data=ADDRESS + 4), "weight: data must be aligned to 16"),
    ):
        status, message = said(weight=weight)
        assert (status, text in message) == (INVALID, True), message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight": tensor(I32, 304, 40)}, "weight: K must be a positive multiple of 128, got 320"),
        ({"weight": tensor(I32, 312, 32)}, "weight: N must be a multiple of 16, got 312"),
        ({"weight": tensor(I32, 304, 32, data=ADDRESS + 4)}, "weight: data must be aligned to 16"),
        ({"scale": tensor(F32, 304, 2)}, "scale: expected float16 or bfloat16"),
        ({"scale": tensor(BF16, 304, 16)}, "scale: expected one for each 32, 64 or 128 columns"),
        ({"scale": tensor(BF16, 304, 3)}, "of K = 256, got [304, 3]"),
        ({"zero_point": tensor(U8, 304, 1)}, "zero_point: expected [N, K / group] = [304, 2]"),
        ({"zero_point": tensor(I32, 304, 2)}, "zero_point: expected uint8, got int32"),
    ],
)
def test_linear_int4_names_what_is_wrong(
    library: ctypes.CDLL, changes: dict[str, Any], said: str
) -> None:
    args = ctypes.byref(linear_int4_args(**changes))
    status, message = status_of(library, library.te3_linear_int4, args, None)
    assert status == INVALID
    assert f"linear_int4: {said}" in message or said in message


def test_unpack_wants_an_output_of_the_weights_shape(library: ctypes.CDLL) -> None:
    weight = {"weight": tensor(FP8, 304, 256), "scale": tensor(F32, 304, 1)}
    args = args_of("unpack_fp8")(**weight, out=tensor(BF16, 256, 304))
    status, message = status_of(library, library.te3_unpack_fp8, ctypes.byref(args), None)
    assert (status, "out: expected [N, K] = [304, 256], got [256, 304]" in message) == (INVALID, 1)
    packed = {"weight": tensor(I32, 304, 32), "scale": tensor(BF16, 304, 2)}
    args = args_of("unpack_int4")(**packed, out=tensor(BF16, 304, 128))
    status, message = status_of(library, library.te3_unpack_int4, ctypes.byref(args), None)
    assert (status, "out: expected [N, K] = [304, 256]" in message) == (INVALID, True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"x": tensor(BF16, 5, 200)}, "x: K must be a positive multiple of 128, got 200"),
        ({"q": tensor(F16, 5, 256)}, "q: expected float8_e4m3fn, got float16"),
        ({"q": tensor(BF16, 5, 128)}, "q: expected [M, K] = [5, 256], got [5, 128]"),
        ({"scale": tensor(F32, 5, 1)}, "scale: expected [1 or K / 128, M] = [any, 5]"),
        ({"scale": tensor(F32, 3, 5)}, "scale: expected 1 or K / 128 rows for q [5, 256]"),
    ],
)
def test_quantise_rows_names_what_is_wrong(
    library: ctypes.CDLL, changes: dict[str, Any], said: str
) -> None:
    fields = {"x": tensor(BF16, 5, 256), "q": tensor(FP8, 5, 256), "scale": tensor(F32, 2, 5)}
    function = library.te3_quantise_rows
    args = args_of("quantise_rows")(**fields)
    assert status_of(library, function, ctypes.byref(args), None)[0] == WRONG_DEVICE
    args = args_of("quantise_rows")(**(fields | changes))
    status, message = status_of(library, function, ctypes.byref(args), None)
    assert (status, said in message) == (INVALID, True), message


def check_refusals(library: ctypes.CDLL, name: str, fields: Any, wrong: Any) -> None:
    """``fields`` are well-formed; each of ``wrong`` is (changes, what is said)."""
    function = getattr(library, f"te3_{name}")
    args = args_of(name)(**fields)
    assert status_of(library, function, ctypes.byref(args), None)[0] == WRONG_DEVICE
    for changes, said in wrong:
        args = args_of(name)(**(fields | changes))
        status, message = status_of(library, function, ctypes.byref(args), None)
        assert (status, said in message) == (INVALID, True), message


def test_linear_w8a8_names_what_is_wrong(library: ctypes.CDLL) -> None:
    fields = {
        "x": tensor(FP8, 5, 256),
        "x_scale": tensor(F32, 1, 5),
        "weight": tensor(FP8, 304, 256),
        "scale": tensor(F32, 304, 1),
        "y": tensor(BF16, 5, 304),
    }
    wrong = [
        ({"x": tensor(BF16, 5, 256)}, "x: expected float8_e4m3fn, got bfloat16"),
        ({"x": tensor(FP8, 5, 128)}, "x: expected [M, K] = [any, 256]"),
        ({"x": tensor(I8, 5, 256)}, "weight: expected uint8, got float8_e4m3fn"),
        ({"x_scale": tensor(F32, 2, 5)}, "x_scale: expected [1, M] = [1, 5]"),
        ({"scale": tensor(F32, 304, 2)}, "scale: expected N or 1 rows and 1 column"),
        ({"y": tensor(BF16, 5, 256)}, "y: expected [M, N] = [5, 304]"),
    ]
    check_refusals(library, "linear_w8a8", fields, wrong)
    integers = {"x": tensor(I8, 5, 256), "weight": tensor(U8, 304, 256)}
    fields |= {**integers, "x_scale": tensor(F32, 2, 5)}
    wrong = [({"x_scale": tensor(F32, 1, 5)}, "x_scale: expected [2, M] = [2, 5]")]
    check_refusals(library, "linear_w8a8", fields, wrong)


def test_linear_nvfp4_names_what_is_wrong(library: ctypes.CDLL) -> None:
    fields = {
        "x": tensor(BF16, 3, 256),
        "weight": tensor(I32, 304, 32),
        "scale": tensor(FP8, 304, 16),
        "row_scale": tensor(F32, 304, 1),
        "y": tensor(BF16, 3, 304, data=2 * ADDRESS),
    }
    wrong = [
        ({"scale": tensor(FP8, 304, 8)}, "scale: expected [N, K / 16] = [304, 16]"),
        ({"scale": tensor(U8, 304, 16)}, "scale: expected float8_e4m3fn, got uint8"),
        ({"row_scale": tensor(F32, 1, 1)}, "row_scale: expected [N, 1] = [304, 1]"),
        ({"weight": tensor(I32, 304, 40)}, "weight: K must be a positive multiple of 128"),
    ]
    check_refusals(library, "linear_nvfp4", fields, wrong)


def test_rows_of_silu_and_of_a_norm_name_what_is_wrong(library: ctypes.CDLL) -> None:
    codes = {"q": tensor(FP8, 5, 256, data=2 * ADDRESS), "scale": tensor(F32, 1, 5)}
    wrong = [
        ({"gate_up": tensor(BF16, 5, 300)}, "gate_up: K must be a positive multiple of 128"),
        ({"q": tensor(FP8, 5, 512)}, "q: expected [M, K] = [5, 256]"),
        ({"q": tensor(I8, 5, 256)}, "scale: expected 2 rows for q [5, 256]"),
    ]
    fields = {"gate_up": tensor(BF16, 5, 512), **codes}
    check_refusals(library, "quantise_silu_mul", fields, wrong)
    row = tensor(BF16, 5, 256)
    fields = {"x": row, "residual": row, "weight": tensor(BF16, 256), "sum": row, **codes}
    wrong = [
        ({"weight": tensor(BF16, 128)}, "weight: expected [K] = [256]"),
        ({"sum": tensor(F32, 5, 256)}, "sum: expected bfloat16, got float32"),
        ({"sum": tensor(BF16, 5, 256, data=None)}, "residual and sum: give both or neither"),
    ]
    check_refusals(library, "quantise_add_rms_norm", fields, wrong)
