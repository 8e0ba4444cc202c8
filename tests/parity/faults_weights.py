"""Faults of quantised weights: in unpacking, in scaling, and in making them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.parity.fault import STEP, Fault
from tests.parity.planting import Planted
from trt_eagle3.checkpoint.quantised.weight import QuantisedRef
from trt_eagle3.graph.formats import awq, fp8
from trt_eagle3.graph.formats.format import IntegerRows, Stored
from trt_eagle3.graph.formats.pack_quantized import PackQuantizedFormat
from trt_eagle3.graph.weights import Quantised

VALUES = "weights.values"
FIRST = "layers.0.self_attn.q_proj.weight"


def _scales(change: Callable[[Tensor], Tensor]) -> Callable[[Planted], None]:
    """Blocks of FP8 are given other blocks' scales."""
    real = fp8.scale_rows

    def scale_rows(part: Quantised, scale: Tensor, rows: slice) -> Tensor:
        return real(part, change(scale).contiguous(), rows)

    return lambda p: p.patch.setattr(fp8, "scale_rows", scale_rows)


def _no_zero_points(p: Planted) -> None:
    real = PackQuantizedFormat.rows

    def rows(self: Any, part: Quantised, stored: Stored, wanted: slice) -> IntegerRows:
        found = real(self, part, stored, wanted)
        return dataclasses.replace(found, zeros=torch.full_like(found.zeros, 8))

    p.patch.setattr(PackQuantizedFormat, "rows", rows)


def _swapped_scales(p: Planted) -> None:
    names = [f"layers.5.mlp.{name}_proj.weight" for name in ("gate", "up")]
    refs = [p.spec.tensors[name] for name in names]
    changed = dict(p.spec.tensors)
    for name, ref, other in zip(names, refs, reversed(refs), strict=True):
        assert isinstance(ref, QuantisedRef)
        assert isinstance(other, QuantisedRef)
        tensors = {**ref.tensors, "scale": other.tensors["scale"]}
        changed[name] = dataclasses.replace(ref, tensors=tensors)
    p.rebuild("target", dataclasses.replace(p.spec, tensors=changed))


def _shifted_scales(p: Planted) -> None:
    ref = p.spec.tensors["layers.3.mlp.down_proj.weight"]
    assert isinstance(ref, QuantisedRef)
    p.reweigh("target", ref.tensors["scale"], lambda scale: scale.roll(1, dims=0) * 2)


def _scaled_norm(p: Planted) -> None:
    ref = p.spec.tensors["layers.2.input_layernorm.weight"]
    p.reweigh("target", ref, lambda norm: norm / 2)


WEIGHTS: Mapping[str, Fault] = {
    "scales transposed": Fault(
        "the scales of FP8 blocks are transposed",
        VALUES,
        FIRST,
        _scales(lambda scale: scale.T.reshape(scale.shape)),
        also=(STEP,),
        bundle="fp8",
    ),
    "scales off by a block": Fault(
        "every FP8 block has the scale of the block before it",
        VALUES,
        FIRST,
        _scales(lambda scale: scale.roll(1, dims=-1)),
        also=(STEP,),
        bundle="fp8",
    ),
    "zero points dropped": Fault(
        "the zero points of INT4 weights are ignored",
        VALUES,
        FIRST,
        _no_zero_points,
        also=(STEP,),
        bundle="w4a16-asymmetric",
    ),
    "packing order": Fault(
        "AWQ's numbers are unpacked in the order of GPTQ's",
        VALUES,
        FIRST,
        lambda p: p.patch.setattr(awq, "_PLACES", tuple(range(8))),
        also=(STEP,),
        bundle="awq",
    ),
    "gate and up scales": Fault(
        "the scales of gate and up projections are swapped",
        VALUES,
        "layers.5.mlp.gate_proj.weight",
        _swapped_scales,
        also=(STEP,),
        bundle="w4a16-asymmetric",
    ),
    "made scales shifted": Fault(
        "the build writes every row of a weight with another row's scale",
        "weights.made",
        "layers.3.mlp.down_proj.weight",
        _shifted_scales,
        bundle="made",
    ),
    "scales of a calibration twice": Fault(
        "a norm is divided by a calibration's scales, and what it feeds is not multiplied",
        "weights.made",
        "layers.2.input_layernorm.weight",
        _scaled_norm,
        bundle="calibrated",
    ),
}
