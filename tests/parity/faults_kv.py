"""Faults of an FP8 KV cache: in its scales, in rounding and in reading."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.parity.fault import Fault
from tests.parity.planting import Planted
from trt_eagle3.checkpoint.kv_scales import KVScales

ATTENTION = importlib.import_module("trt_eagle3.graph.ops.tree_attention")
KV_ROWS = importlib.import_module("trt_eagle3.graph.ops.kv_rows")
BUNDLE = "fp8-kv"
ROWS = "kv.rows"

Layers = Mapping[int, KVScales]


def _scales(change: Callable[[Layers], Layers]) -> Callable[[Planted], None]:
    """The graph has other scales than the checkpoint."""

    def plant(p: Planted) -> None:
        found = change(p.spec.kv_scales)
        p.rebuild("target", dataclasses.replace(p.spec, kv_scales=found))

    return plant


def _each(change: Callable[[KVScales], KVScales]) -> Callable[[Planted], None]:
    return _scales(lambda layers: {k: change(scales) for k, scales in layers.items()})


def _encode(change: Callable[[Callable[..., Tensor], Tensor, Tensor], Tensor]) -> Any:
    """Keys and values are rounded in another way."""
    real = KV_ROWS.encode
    return lambda p: p.patch.setattr(KV_ROWS, "encode", lambda x, scales: change(real, x, scales))


def _dropped(encode: Callable[..., Tensor], x: Tensor, scales: Tensor) -> Tensor:
    quotient = x.float() * scales.reciprocal()[:, None]
    return encode(torch.where(quotient.abs() > 448, 0, x), scales)


def _decode(p: Planted) -> None:
    real = ATTENTION.decode
    p.patch.setattr(
        ATTENTION, "decode", lambda codes, scales, dtype: real(codes, scales.flip(0), dtype)
    )


KV: Mapping[str, Fault] = {
    "scales of keys and values": Fault(
        "keys are rounded with the scales of values, and values with those of keys",
        ROWS,
        "k_cache.0",
        _each(lambda scales: KVScales(scales.v, scales.k)),
        bundle=BUNDLE,
    ),
    "scales of heads": Fault(
        "every head's values are rounded with another head's scale",
        ROWS,
        "v_cache.0",
        _each(lambda scales: KVScales(scales.k, scales.v[::-1])),
        bundle=BUNDLE,
    ),
    "scales of layers": Fault(
        "a layer's keys and values are rounded with the next layer's scales",
        ROWS,
        "k_cache.3",
        _scales(lambda layers: {**layers, 3: layers[4]}),
        bundle=BUNDLE,
    ),
    "no saturation": Fault(
        "keys and values that are too large for FP8 are lost, instead of made the largest",
        ROWS,
        "k_cache.1",
        _encode(_dropped),
        bundle=BUNDLE,
    ),
    "read with other scales": Fault(
        "attention multiplies FP8 keys and values by another head's scale",
        "kv.attention",
        "layers.0.self_attn.out",
        _decode,
        bundle=BUNDLE,
    ),
}
