"""What the C library refuses of a layer's dense products; no GPU needed."""

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
    I32,
    INVALID,
    U8,
    WRONG_DEVICE,
    args_of,
    status_of,
    tensor,
)

A, H, I, N, M = 256, 128, 384, 48, 3  # noqa: E741
SHAPES = {"o": (H, A), "gate_up": (2 * I, H), "down": (H, I), "qkv": (N, H)}
NO_NEXT = {
    "next_norm": tensor(BF16, H, data=None),
    "qkv": tensor(I32, N, H // 8, data=None),
    "qkv_scale": tensor(BF16, N, 1, data=None),
    "y": tensor(BF16, M, N, data=None),
}


def rows() -> dict[str, Any]:
    return {
        "x": tensor(BF16, M, A),
        "residual": tensor(BF16, M, H),
        "norm": tensor(BF16, H),
        "next_norm": tensor(BF16, H),
        "barrier": tensor(I32, 1),
        "middle": tensor(BF16, M, H, data=2 * ADDRESS),
        "inner": tensor(BF16, M, I, data=3 * ADDRESS),
        "total": tensor(BF16, M, H, data=4 * ADDRESS),
        "y": tensor(BF16, M, N, data=5 * ADDRESS),
    }


def int4_args(**changes: Any) -> Any:
    fields = rows()
    for name, (n, k) in SHAPES.items():
        fields[name] = tensor(I32, n, k // 8)
        fields[f"{name}_scale"] = tensor(BF16, n, k // 128)
    return args_of("dense_layer_int4")(**(fields | changes))


def fp8_args(**changes: Any) -> Any:
    fields = rows()
    for name, (n, k) in SHAPES.items():
        fields[name] = tensor(FP8, n, k)
        fields[f"{name}_scale"] = tensor(F32, n, 1)
    return args_of("dense_layer_fp8")(**(fields | changes))


@pytest.mark.parametrize(
    "changes",
    [{}, NO_NEXT, {"down_zero_point": tensor(U8, H, 3)}, {"slots": 4}],
    ids=["whole", "no next layer", "zero points", "slots"],
)
def test_int4_layers_are_taken(library: ctypes.CDLL, changes: dict[str, Any]) -> None:
    args = ctypes.byref(int4_args(**changes))
    status, message = status_of(library, library.te3_dense_layer_int4, args, None)
    assert status == WRONG_DEVICE, message


@pytest.mark.parametrize("scale", [tensor(F32, *s) for s in ((768, 1), (6, 1), (1, 1))])
def test_fp8_layers_are_taken(library: ctypes.CDLL, scale: Any) -> None:
    args = ctypes.byref(fp8_args(gate_up_scale=scale))
    status, message = status_of(library, library.te3_dense_layer_fp8, args, None)
    assert status == WRONG_DEVICE, message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"x": tensor(I32, M, A)}, "x: expected float32, float16 or bfloat16, got int32"),
        ({"residual": tensor(F16, M, H)}, "residual: expected bfloat16, got float16"),
        ({"residual": tensor(BF16, M + 1, H)}, "residual: expected [M, H] = [3, any]"),
        ({"o": tensor(I32, H, A)}, "o: expected [N, K] = [128, 32], got [128, 256]"),
        ({"gate_up": tensor(I32, 640, 16)}, "I: must be a positive multiple of 128, got 320"),
        ({"down": tensor(FP8, H, I)}, "down: expected int32, got float8_e4m3fn"),
        ({"down": tensor(I32, H, 48, data=ADDRESS + 8)}, "down: data must be aligned to 16"),
        ({"qkv": tensor(I32, N, 16, data=None)}, "next_norm, qkv and y: give all or none"),
        ({"qkv": tensor(I32, 40, 16)}, "N: must be a positive multiple of 16, got 40"),
        ({"next_norm": tensor(BF16, 2 * H)}, "next_norm: expected [H] = [128], got [256]"),
        ({"barrier": tensor(I32, 2)}, "barrier: expected [1] = [1], got [2]"),
        ({"barrier": tensor(I32, 1, data=None)}, "barrier: data is null"),
        ({"total": tensor(BF16, M, H, data=2 * ADDRESS)}, "each needs memory of its own"),
        ({"middle": tensor(BF16, M, H)}, "each needs memory of its own"),
        ({"inner": tensor(BF16, M, H, data=3 * ADDRESS)}, "inner: expected [M, I] = [3, 384]"),
        ({"o_scale": tensor(F32, H, 2)}, "o_scale: expected float16 or bfloat16"),
        ({"o_scale": tensor(BF16, H, 4)}, "o_scale: expected [N, K / 128] = [128, 2]"),
        ({"down_scale": tensor(F16, H, 3)}, "down_scale: expected bfloat16, got float16"),
        ({"qkv_zero_point": tensor(U8, N, 2)}, "qkv_zero_point: expected [N, K / 128] = [48, 1]"),
        ({"slots": 1}, "slots: expected 0, or 2 or more, got 1"),
    ],
)
def test_int4_layers_are_refused(library: ctypes.CDLL, changes: dict[str, Any], said: str) -> None:
    args = ctypes.byref(int4_args(**changes))
    status, message = status_of(library, library.te3_dense_layer_int4, args, None)
    assert status == INVALID
    assert said in message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"down_scale": tensor(F32, H, 2)}, "down_scale: expected N, ceil(N / 128) or 1 rows"),
        ({"down_scale": tensor(BF16, H, 1)}, "down_scale: expected float32, got bfloat16"),
        ({"qkv_scale": tensor(F32, N, 1, data=None)}, "qkv_scale: data is null"),
        ({"o": tensor(I32, H, A)}, "o: expected float8_e4m3fn, got int32"),
    ],
)
def test_fp8_layers_are_refused(library: ctypes.CDLL, changes: dict[str, Any], said: str) -> None:
    args = ctypes.byref(fp8_args(**changes))
    status, message = status_of(library, library.te3_dense_layer_fp8, args, None)
    assert status == INVALID
    assert said in message
