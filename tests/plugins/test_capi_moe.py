"""What the C library refuses of a mixture of experts; no GPU needed."""

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

OUT = 2 * ADDRESS
ROUTED = {"x": tensor(BF16, 3, 256), "router_logits": tensor(BF16, 3, 12)}
FORMS: dict[str, dict[str, Any]] = {
    "fused_moe": {"gate_up": tensor(BF16, 12, 768, 256), "down": tensor(BF16, 12, 256, 384)},
    "fused_moe_fp8": {
        "gate_up": tensor(FP8, 12, 768, 256),
        "gate_up_scale": tensor(F32, 12, 768, 1),
        "down": tensor(FP8, 12, 256, 384),
        "down_scale": tensor(F32, 12, 2, 3),
    },
    "fused_moe_int4": {
        "gate_up": tensor(I32, 12, 768, 32),
        "gate_up_scale": tensor(BF16, 12, 768, 4),
        "gate_up_zero_point": tensor(U8, 12, 768, 4),
        "down": tensor(I32, 12, 256, 48),
        "down_scale": tensor(BF16, 12, 256, 6),
        "down_zero_point": tensor(U8, 12, 256, 6),
    },
}


def call(library: ctypes.CDLL, form: str, **changes: Any) -> tuple[int, str]:
    fields = {**ROUTED, **FORMS[form], "y": tensor(BF16, 3, 256, data=OUT), "top_k": 4}
    args = args_of(form)(**(fields | changes), renormalise=1)
    return status_of(library, getattr(library, f"te3_{form}"), ctypes.byref(args), None, 0, None)


@pytest.mark.parametrize("form", FORMS)
def test_what_fits_gets_as_far_as_the_device(library: ctypes.CDLL, form: str) -> None:
    status, message = call(library, form)
    assert status == WRONG_DEVICE, message


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"x": tensor(BF16, 256)}, "x: expected [n, H] = [any, any], got [256]"),
        ({"x": tensor(I32, 3, 256)}, "x: expected float32, float16 or bfloat16, got int32"),
        ({"x": tensor(BF16, 3, 200)}, "H: must be a positive multiple of "),
        ({"router_logits": tensor(F32, 3, 12)}, "router_logits: expected bfloat16, got float32"),
        ({"router_logits": tensor(BF16, 3, 13)}, "router_logits: expected [n, E] = [3, 12]"),
        ({"y": tensor(BF16, 3, 257, data=OUT)}, "y: expected [n, H] = [3, 256], got [3, 257]"),
        ({"y": tensor(BF16, 3, 256)}, "y: must not be an input's memory"),
        ({"top_k": 13}, "top_k: expected 1 to 16 and no more than the 12 experts, got 13"),
        ({"top_k": 0}, "top_k: expected 1 to 16 and no more than the 12 experts, got 0"),
    ],
)
def test_fused_moe_names_what_is_wrong(
    library: ctypes.CDLL, form: str, changes: dict[str, Any], said: str
) -> None:
    status, message = call(library, form, **changes)
    assert (status, said in message) == (INVALID, True), message


@pytest.mark.parametrize(
    ("form", "changes", "said"),
    [
        ("fused_moe", {"gate_up": tensor(BF16, 12, 767, 256)}, "gate_up: expected [E, 2 * I, H]"),
        ("fused_moe", {"gate_up": tensor(F16, 12, 768, 256)}, "gate_up: expected bfloat16"),
        ("fused_moe", {"down": tensor(BF16, 12, 256, 380)}, "down: expected [E, H, I] = [12, 256"),
        (
            "fused_moe",
            {"gate_up": tensor(BF16, 12, 760, 256), "down": tensor(BF16, 12, 256, 380)},
            "I: must be a positive multiple of 8, got 380",
        ),
        (
            "fused_moe",
            {
                "gate_up": tensor(BF16, 513, 768, 256),
                "down": tensor(BF16, 513, 256, 384),
                "router_logits": tensor(BF16, 3, 513),
            },
            "router_logits: at most 512 experts, got 513",
        ),
        (
            "fused_moe_fp8",
            {"gate_up": tensor(FP8, 12, 640, 256), "down": tensor(FP8, 12, 256, 320)},
            "I: must be a positive multiple of 128, got 320",
        ),
        ("fused_moe_fp8", {"gate_up_scale": tensor(F32, 768, 1)}, "gate_up_scale: expected [E"),
        ("fused_moe_fp8", {"down_scale": tensor(F32, 12, 2, 2)}, "down_scale: expected N, ceil"),
        ("fused_moe_fp8", {"down_scale": tensor(BF16, 12, 2, 3)}, "down_scale: expected float32"),
        (
            "fused_moe_fp8",
            {"down": tensor(FP8, 12, 256, 384, data=ADDRESS + 8)},
            "data must be aligned to 16",
        ),
        (
            "fused_moe_int4",
            {"gate_up_scale": tensor(BF16, 12, 768, 3)},
            "gate_up_scale: expected one for each 32, 64 or 128 columns of H = 256",
        ),
        (
            "fused_moe_int4",
            {"down_scale": tensor(BF16, 12, 256, 3)},
            "down_scale: expected [E, N, K / group] = [12, 256, 6]",
        ),
        (
            "fused_moe_int4",
            {"down_zero_point": tensor(U8, 12, 256, 6, data=None)},
            "down_zero_point: expected where gate_up_zero_point is, and only there",
        ),
        ("fused_moe_int4", {"gate_up_scale": tensor(F32, 12, 768, 4)}, "float16 or bfloat16"),
    ],
)
def test_experts_are_named_where_they_do_not_fit(
    library: ctypes.CDLL, form: str, changes: dict[str, Any], said: str
) -> None:
    status, message = call(library, form, **changes)
    assert (status, said in message) == (INVALID, True), message


def rows_args(name: str, **changes: Any) -> Any:
    ints = {n: tensor(I32, 70, 4) for n in ("experts", "places", "positions")}
    fields = {
        "router_logits": tensor(BF16, 70, 12),
        "shares": tensor(F32, 70, 4),
        "counts": tensor(I32, 2, 12),
        "x": tensor(BF16, 70, 64),
        "gathered": tensor(BF16, 280, 64, data=OUT),
        "ends": tensor(I32, 12),
        "parts": tensor(BF16, 280, 64),
        "y": tensor(BF16, 70, 64, data=OUT),
        **ints,
        **changes,
    }
    struct = args_of(name)
    return struct(**{n: fields[n] for n, _ in struct._fields_ if n in fields})


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("route_rows", {"experts": tensor(I32, 70, 17)}, "top_k: expected 1 to 16"),
        ("route_rows", {"counts": tensor(I32, 1, 12)}, "counts: expected [ceil(n / 64), E] = [2,"),
        ("route_rows", {"shares": tensor(F32, 70, 3)}, "shares: expected [n, k] = [70, 4]"),
        ("gather_rows", {"x": tensor(BF16, 70, 60)}, "H: must be a positive multiple of 8, got 60"),
        ("gather_rows", {"gathered": tensor(BF16, 70, 64)}, "gathered: expected [n * k, H] = [280"),
        ("gather_rows", {"ends": tensor(I32, 13)}, "ends: expected [E] = [12], got [13]"),
        ("gather_rows", {"places": tensor(I32, 69, 4)}, "places: expected [n, k] = [70, 4]"),
        ("combine_rows", {"parts": tensor(BF16, 279, 64)}, "parts: expected [n * k, H] = [280"),
        ("combine_rows", {"positions": tensor(I32, 71, 4)}, "positions: expected [n, k] = [70, 4]"),
    ],
)
def test_rows_by_expert_are_named_where_they_do_not_fit(
    library: ctypes.CDLL, name: str, changes: dict[str, Any], said: str
) -> None:
    function = getattr(library, f"te3_{name}")
    assert status_of(library, function, ctypes.byref(rows_args(name)), None)[0] == WRONG_DEVICE
    args = ctypes.byref(rows_args(name, **changes))
    status, message = status_of(library, function, args, None)
    assert (status, said in message) == (INVALID, True), message
