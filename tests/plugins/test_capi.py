"""What the C library refuses, and what its torch binding refuses before it; no GPU needed."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.plugins.capi_calls import (
    ADDRESS,
    BF16,
    BOOL,
    F32,
    I32,
    INVALID,
    PLUGINS,
    U8,
    WRONG_DEVICE,
    args_of,
    status_of,
    tensor,
)
from trt_eagle3.engine import capi
from trt_eagle3.engine.capi.library import library as load_library
from trt_eagle3.errors import EnvironmentMissingError


def tree_args(**changes: Any) -> Any:
    """A sound launch of 2 sequences, 4 new tokens each, 8 query and 2 KV heads of 64."""
    fields = {
        "q": tensor(BF16, 8, 512),
        "k": tensor(BF16, 8, 128),
        "v": tensor(BF16, 8, 128),
        "k_cache": tensor(BF16, 160, 2, 64),
        "v_cache": tensor(BF16, 160, 2, 64),
        "past_lengths": tensor(I32, 2),
        "query_lengths": tensor(I32, 2),
        "page_table": tensor(I32, 2, 4),
        "tree_mask": tensor(BOOL, 2, 4, 6),
        "out": tensor(BF16, 8, 512, data=2 * ADDRESS),
        "page_size": 16,
        "scale": 0.125,
    }
    return args_of("tree_attention")(**(fields | changes))


FP8_CACHES = {
    "k_cache": tensor(U8, 160, 2, 64),
    "v_cache": tensor(U8, 160, 2, 64),
    "kv_scales": tensor(F32, 2, 2),
}


def refusal(library: ctypes.CDLL, **changes: Any) -> str:
    args = ctypes.byref(tree_args(**changes))
    status, message = status_of(library, library.te3_tree_attention, args, None, 0, None)
    assert status == INVALID, message
    return message


def test_sound_arguments_get_as_far_as_the_device_check(library: ctypes.CDLL) -> None:
    args = ctypes.byref(tree_args())
    status, message = status_of(library, library.te3_tree_attention, args, None, 0, None)
    assert status == WRONG_DEVICE
    assert "device" in message


def test_sound_arguments_of_an_fp8_cache_get_as_far_as_the_device_check(
    library: ctypes.CDLL,
) -> None:
    args = ctypes.byref(tree_args(**FP8_CACHES))
    assert status_of(library, library.te3_tree_attention, args, None, 0, None)[0] == WRONG_DEVICE


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"k": tensor(BF16, 8, 64)}, "k: expected [B * S, Hkv * D] = [8, 128], got [8, 64]"),
        ({"k": tensor(F32, 8, 128)}, "k: expected bfloat16, got float32"),
        ({"q": tensor(I32, 8, 512)}, "q: expected float32, float16 or bfloat16, got int32"),
        ({"q": tensor(BF16, 8, 500)}, "q: Hq * D must be a multiple of Hkv * D = 128"),
        ({"q": tensor(BF16, 8, 512, data=ADDRESS + 2)}, "q: data must be aligned to 16 bytes"),
        ({"v": tensor(BF16, 8, 128, data=None)}, "v: data is null"),
        (
            {"v_cache": tensor(BF16, 144, 2, 64)},
            "v_cache: expected [slots, Hkv, D] = [160, 2, 64], got [144, 2, 64]",
        ),
        ({"tree_mask": tensor(BOOL, 2, 4, 3)}, "tree_mask: M must be at least S"),
        ({"tree_mask": tensor(BOOL, 2, 4, 6, data=None)}, "tree_mask: data is null"),
        ({"past_lengths": tensor(I32, 3)}, "past_lengths: expected [B] = [2], got [3]"),
        ({"page_table": tensor(I32, 8)}, "page_table: expected [B, P] = [2, any], got [8]"),
        ({"page_size": 0}, "page_size: must be positive and divide"),
        ({"page_size": 48}, "page_size: must be positive and divide the cache's 160 slots, got 48"),
        ({"mask": 7}, "mask: unknown kind 7"),
        ({"path": 9}, "path: unknown 9"),
        ({"num_splits": -1}, "num_splits: must not be negative"),
        ({"scale": 0.0}, "scale: must be positive, got 0.000000"),
        ({"scale": float("nan")}, "scale: must be positive, got nan"),
        ({"out": tensor(BF16, 8, 512)}, "out: must not be q's memory"),
        (
            {"kv_scales": tensor(F32, 2, 2)},
            "k_cache: expected uint8, got bfloat16",
        ),
        ({"k_cache": tensor(U8, 160, 2, 64)}, "k_cache: expected bfloat16, got uint8"),
        (
            FP8_CACHES | {"kv_scales": tensor(F32, 2, 3)},
            "kv_scales: expected [2, Hkv] = [2, 2], got [2, 3]",
        ),
        (
            FP8_CACHES | {"kv_scales": tensor(BF16, 2, 2)},
            "kv_scales: expected float32, got bfloat16",
        ),
        (
            FP8_CACHES | {"v_cache": tensor(U8, 160, 2, 64, data=ADDRESS + 1)},
            "k_cache and v_cache: data must be aligned to 16 bytes",
        ),
        (
            {"page_table": tensor(I32, 2, 1 << 27)},
            "sizes: slots, P * page_size + M and N * Hq must fit 32 bits",
        ),
        (
            {"k_cache": tensor(BF16, 1 << 32, 2, 64), "v_cache": tensor(BF16, 1 << 32, 2, 64)},
            "sizes: slots",
        ),
    ],
)
def test_tree_attention_names_what_is_wrong(
    library: ctypes.CDLL, changes: dict[str, Any], said: str
) -> None:
    assert f"tree_attention: {said}" in refusal(library, **changes)


def test_the_largest_sizes_of_use_are_taken(library: ctypes.CDLL) -> None:
    batch, tokens, positions = 32, 16384, 262144
    rows, cache = batch * tokens, tensor(BF16, batch * positions, 8, 128)
    sizes = {
        "q": tensor(BF16, rows, 64 * 128),
        "out": tensor(BF16, rows, 64 * 128, data=2 * ADDRESS),
        "k": tensor(BF16, rows, 8 * 128),
        "v": tensor(BF16, rows, 8 * 128),
        "k_cache": cache,
        "v_cache": cache,
        "past_lengths": tensor(I32, batch),
        "query_lengths": tensor(I32, batch),
        "page_table": tensor(I32, batch, positions // 16),
        "tree_mask": tensor(BOOL, batch, tokens, 2 * tokens),
    }
    args = ctypes.byref(tree_args(**sizes))
    status, message = status_of(library, library.te3_tree_attention, args, None, 0, None)
    assert status == WRONG_DEVICE, message


def test_too_many_sequences_for_one_launch_are_refused(library: ctypes.CDLL) -> None:
    many = 40000
    sizes = {
        "q": tensor(BF16, many, 512),
        "out": tensor(BF16, many, 512, data=2 * ADDRESS),
        "k": tensor(BF16, many, 128),
        "v": tensor(BF16, many, 128),
        "past_lengths": tensor(I32, many),
        "query_lengths": tensor(I32, many),
        "page_table": tensor(I32, many, 4),
        "tree_mask": tensor(BOOL, many, 1, 1),
    }
    assert "B * Hkv: at most 65535, got 80000" in refusal(library, **sizes)


def test_causal_attention_needs_no_mask(library: ctypes.CDLL) -> None:
    args = ctypes.byref(tree_args(mask=1, tree_mask=tensor(BOOL, 2, 4, 4, data=None)))
    assert library.te3_tree_attention(args, None, 0, None) == WRONG_DEVICE


def test_null_arguments_are_refused(library: ctypes.CDLL) -> None:
    assert library.te3_tree_attention(None, None, 0, None) == INVALID
    assert library.te3_kv_move(None, None) == INVALID


def test_qk_norm_mrope_wants_both_norms_or_neither(library: ctypes.CDLL) -> None:
    args = args_of("qk_norm_mrope")(
        qkv=tensor(F32, 6, 12 * 64),
        position_ids=tensor(I32, 3, 2, 3),
        inv_freq=tensor(F32, 32),
        pair_axis=tensor(I32, 32),
        q_norm=tensor(F32, 64),
        q=tensor(F32, 6, 512),
        k=tensor(F32, 6, 128),
        v=tensor(F32, 6, 128),
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
    )
    status, message = status_of(library, library.te3_qk_norm_mrope, ctypes.byref(args), None)
    assert (status, "give both or neither" in message) == (INVALID, True)
    args.k_norm = tensor(F32, 64)
    assert library.te3_qk_norm_mrope(ctypes.byref(args), None) == WRONG_DEVICE
    args.position_ids = tensor(I32, 3, 2, 4)
    assert library.te3_qk_norm_mrope(ctypes.byref(args), None) == INVALID


def test_add_rms_norm_wants_a_sum_exactly_with_a_residual(library: ctypes.CDLL) -> None:
    args = args_of("add_rms_norm")(x=tensor(F32, 3, 8), weight=tensor(F32, 8), y=tensor(F32, 3, 8))
    assert library.te3_add_rms_norm(ctypes.byref(args), None) == WRONG_DEVICE
    args.residual = tensor(F32, 3, 8)
    status, message = status_of(library, library.te3_add_rms_norm, ctypes.byref(args), None)
    assert (status, message) == (INVALID, "add_rms_norm: residual and sum: give both or neither")


@pytest.mark.parametrize(("dtype", "width"), [(BF16, 4), (I32, 2), (U8, 8)])
def test_kv_move_refuses_rows_that_are_no_multiple_of_16_bytes(
    library: ctypes.CDLL, dtype: int, width: int
) -> None:
    moves = tensor(I32, 1, 2)
    args = args_of("kv_move")(cache=tensor(dtype, 4, 10, 1, width), source=moves, destination=moves)
    status, message = status_of(library, library.te3_kv_move, ctypes.byref(args), None)
    assert status == INVALID
    assert "multiple of 16 bytes, got 8" in message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"qkv": tensor(I32, 20, 432)}, "qkv: expected float32, float16 or bfloat16, got int32"),
        ({"qkv": tensor(BF16, 20, 431)}, "qkv: expected 3 * num_heads * head_dim columns"),
        ({"qkv": tensor(BF16, 20, 3 * 2 * 132)}, "at most 128"),
        ({"qkv": tensor(BF16, 20, 3 * 2 * 70)}, "a multiple of 4"),
        ({"num_heads": 0}, "num_heads: must be positive"),
        (
            {"rope_positions": tensor(I32, 3, 20)},
            "rope_positions: expected [2, n] = [2, 20], got [3, 20]",
        ),
        ({"rope_positions": tensor(I32, 2, 19)}, "rope_positions: expected [2, n]"),
        ({"inv_freq": tensor(BF16, 36)}, "inv_freq: expected float32, got bfloat16"),
        ({"pair_axis": tensor(I32, 35)}, "pair_axis: expected [D / 2] = [36], got [35]"),
        ({"frame_starts": tensor(I32, 1)}, "frame_starts: expected [F + 1], F at least 1, got [1]"),
        ({"frame_starts": tensor(I32, 2, data=None)}, "frame_starts: data is null"),
        ({"out": tensor(BF16, 20, 432)}, "out: expected [n, H * D] = [20, 144], got [20, 432]"),
        ({"path": 9}, "path: unknown 9"),
        ({"scale": float("nan")}, "scale: must be positive, got nan"),
    ],
)
def test_vision_attention_names_what_is_wrong(
    library: ctypes.CDLL, changes: dict[str, Any], reason: str
) -> None:
    fields = {
        "qkv": tensor(BF16, 20, 432),
        "rope_positions": tensor(I32, 2, 20),
        "inv_freq": tensor(F32, 36),
        "pair_axis": tensor(I32, 36),
        "frame_starts": tensor(I32, 3),
        "out": tensor(BF16, 20, 144),
        "num_heads": 2,
        "scale": 0.1,
    }
    args = args_of("vision_attention")(**fields)
    assert (
        status_of(library, library.te3_vision_attention, ctypes.byref(args), None, 0, None)[0]
        == WRONG_DEVICE
    )
    args = args_of("vision_attention")(**(fields | changes))
    status, message = status_of(
        library, library.te3_vision_attention, ctypes.byref(args), None, 0, None
    )
    assert status == INVALID
    assert reason in message


def test_gpus_newer_than_those_named_get_code_to_compile() -> None:
    text = (PLUGINS / "CMakeLists.txt").read_text()
    named = re.search(r'set\(TRT_EAGLE3_ARCHITECTURES "([^"]+)"', text)
    assert named is not None
    assert "90-virtual" in named[1].split(";")


def test_binding_refuses_tensors_of_the_cpu(library: ctypes.CDLL) -> None:
    assert library is not None
    with pytest.raises(ValueError, match="CUDA device"):
        capi.silu_mul(torch.zeros(2, 16))


def test_binding_refuses_strided_tensors() -> None:
    with pytest.raises(ValueError, match="gate_up: expected a contiguous tensor"):
        capi.silu_mul(torch.zeros(16, 2).T, torch.zeros(2, 8))


def test_binding_refuses_unknown_dtypes() -> None:
    with pytest.raises(ValueError, match="x: expected one of"):
        capi.add_rms_norm(torch.zeros(2, 16, dtype=torch.float64), torch.zeros(16), epsilon=1e-6)


def test_a_missing_library_says_how_to_build_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    load_library.cache_clear()
    monkeypatch.setenv(capi.LIBRARY_VARIABLE, str(tmp_path / "none.so"))
    with pytest.raises(EnvironmentMissingError, match="install-kernels"):
        load_library()
    load_library.cache_clear()
