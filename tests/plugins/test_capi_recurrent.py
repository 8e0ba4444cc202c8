"""What the C library refuses of recurrent layers; no GPU needed."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from tests.plugins.capi_calls import (
    ADDRESS,
    BF16,
    BOOL,
    F32,
    I32,
    INVALID,
    WRONG_DEVICE,
    args_of,
    status_of,
    tensor,
)

OUT = 2 * ADDRESS
# B 2, S 70, M 70, Hk 2 of 8, Hv 4 of 12, W 4, E 5
DELTA: dict[str, Any] = {
    "qkvz": tensor(BF16, 140, 128),
    "ba": tensor(BF16, 140, 8),
    "conv_weight": tensor(BF16, 80, 1, 4),
    "a_log": tensor(F32, 4),
    "dt_bias": tensor(F32, 4),
    "norm": tensor(BF16, 12),
    "conv_state": tensor(BF16, 5, 3, 80),
    "delta_state": tensor(F32, 5, 4, 8, 12),
    "state_reads": tensor(I32, 2),
    "state_writes": tensor(I32, 2),
    "certain": tensor(I32, 2),
    "tree_mask": tensor(BOOL, 2, 70, 70),
    "out": tensor(BF16, 140, 48, data=OUT),
    "conv_rows": tensor(BF16, 2, 64, 80),
    "delta_rows": tensor(F32, 2, 64, 72),
    "num_k_heads": 2,
    "num_v_heads": 4,
    "epsilon": 1e-6,
}
COMMITS: dict[str, dict[str, Any]] = {
    "commit_delta": {
        "state": tensor(F32, 15, 4, 8, 12),
        "rows": tensor(F32, 3, 2, 6, 72),
        "entries": tensor(I32, 2),
        "path": tensor(I32, 2, 5),
    },
    "commit_window": {
        "state": tensor(BF16, 3, 5, 3, 80),
        "rows": tensor(BF16, 3, 2, 6, 80),
        "entries": tensor(I32, 2),
        "path": tensor(I32, 2, 5),
    },
}


def call(
    library: ctypes.CDLL, name: str, fields: dict[str, Any], **changes: Any
) -> tuple[int, str]:
    args = args_of(name)(**(fields | changes))
    workspace = (None, 0) if name == "gated_delta" else ()
    function = getattr(library, f"te3_{name}")
    return status_of(library, function, ctypes.byref(args), *workspace, None)


@pytest.mark.parametrize(("name", "fields"), [("gated_delta", DELTA), *COMMITS.items()])
def test_what_fits_gets_as_far_as_the_device(
    library: ctypes.CDLL, name: str, fields: dict[str, Any]
) -> None:
    status, message = call(library, name, fields)
    assert status == WRONG_DEVICE, message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"qkvz": tensor(I32, 140, 128)}, "qkvz: expected float32, float16 or bfloat16"),
        ({"qkvz": tensor(BF16, 140, 80)}, "qkvz: expected [B * S, C + Hv * Dv] = [140, 128]"),
        ({"ba": tensor(BF16, 140, 4)}, "ba: expected [B * S, 2 * Hv] = [140, 8], got [140, 4]"),
        ({"num_k_heads": 3}, "num_v_heads: expected a multiple of num_k_heads, got 4 and 3"),
        ({"num_k_heads": 0}, "num_v_heads: expected a multiple of num_k_heads, got 4 and 0"),
        ({"conv_weight": tensor(BF16, 79, 1, 4)}, "conv_weight: expected [C, 1, W] = [80, 1, 4]"),
        ({"conv_weight": tensor(BF16, 80, 1, 1)}, "W must be at least 2"),
        ({"conv_state": tensor(BF16, 5, 4, 80)}, "conv_state: expected [E, W - 1, C] = [5, 3, 80]"),
        ({"conv_state": tensor(F32, 5, 3, 80)}, "conv_state: expected bfloat16, got float32"),
        ({"delta_state": tensor(BF16, 5, 4, 8, 12)}, "delta_state: expected float32, got bfloat16"),
        ({"delta_state": tensor(F32, 5, 2, 8, 12)}, "delta_state: expected [E, Hv, Dk, Dv]"),
        ({"state_writes": tensor(I32, 3)}, "state_writes: expected [B] = [2], got [3]"),
        ({"certain": tensor(I32, 2, data=None)}, "certain: data is null"),
        (
            {"tree_mask": tensor(BOOL, 2, 70, 69)},
            "tree_mask: M must be at least S, got [2, 70, 69]",
        ),
        ({"conv_rows": tensor(BF16, 2, 70, 80)}, "conv_rows: expected [B, min(S, 64), C] = [2, 64"),
        ({"delta_rows": tensor(F32, 2, 64, 64)}, "delta_rows: expected [B, min(S, 64), Hk"),
        ({"out": tensor(BF16, 140, 48, data=ADDRESS)}, "out: must not be qkvz's memory"),
        ({"epsilon": -1.0}, "epsilon: must not be negative"),
        ({"chunk_rows": -1}, "blocks_per_head and chunk_rows: must not be negative"),
    ],
)
def test_gated_delta_names_what_is_wrong(
    library: ctypes.CDLL, changes: dict[str, Any], said: str
) -> None:
    status, message = call(library, "gated_delta", DELTA, **changes)
    assert (status, said in message) == (INVALID, True), message


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("commit_delta", {"state": tensor(BF16, 15, 4, 8, 12)}, "state: expected float32"),
        ("commit_delta", {"state": tensor(F32, 16, 4, 8, 12)}, "as many entries in each of 3"),
        ("commit_delta", {"rows": tensor(F32, 3, 2, 6, 70)}, "rows: expected [L, B, T, Hk * Dk"),
        ("commit_delta", {"entries": tensor(I32, 3)}, "entries: expected [B] = [2], got [3]"),
        ("commit_delta", {"path": tensor(I32, 3, 5)}, "path: expected [B, K] = [2, any]"),
        ("commit_window", {"rows": tensor(BF16, 2, 2, 6, 80)}, "rows: expected 3 layers"),
        ("commit_window", {"rows": tensor(F32, 3, 2, 6, 80)}, "rows: expected bfloat16"),
        ("commit_window", {"rows": tensor(BF16, 3, 2, 6, 72)}, "rows: expected [L, B, T, C]"),
        ("commit_window", {"path": tensor(I32, 2, 5, data=None)}, "path: data is null"),
    ],
)
def test_commits_name_what_is_wrong(
    library: ctypes.CDLL, name: str, changes: dict[str, Any], said: str
) -> None:
    status, message = call(library, name, COMMITS[name], **changes)
    assert (status, said in message) == (INVALID, True), message
