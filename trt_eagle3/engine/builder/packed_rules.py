"""Rules for quantised weights that stay packed at run time, based on a checkpoint's index alone.

``engine/torch/packed.py``, ``engine/trt`` and ONNX Runtime's ``MatMulNBits`` make the final choice.
"""

from __future__ import annotations

from trt_eagle3.checkpoint.quantised.weight import QuantisedRef

__all__ = [
    "builders_take",
    "expert_kernels_take",
    "kernels_take",
    "kind_of",
    "matmul_nbits_takes",
]

_INT4 = frozenset({"int4_packed", "awq", "gptq", "gptq_v2"})
_INT8 = frozenset({"int8", "int8_packed"})
_NVFP4 = frozenset({"nvfp4", "nvfp4_divided"})
_BLOCK, _ROWS = 128, 16
_SMALL_GROUPS, _FP4_GROUP = (32, 64), 16


def kind_of(ref: QuantisedRef) -> str:
    """Return its name in ``engine.weights``: ``fp8``, ``int8``, ``int4``; else its own format."""
    return "int4" if ref.format in _INT4 else ref.format.removesuffix("_packed")


def kernels_take(ref: QuantisedRef) -> bool:
    """Return whether our CUDA kernels multiply the weight as stored.

    FP8 and INT8 need scales by row, by tensor, or by 128 columns (INT8: a multiple), and no zero
    points. INT4 needs groups of 32, 64 or a multiple of 128 columns. NVFP4 is supported.
    """
    (rows, columns), block = ref.shape, ref.block[1]
    if rows % _ROWS or columns % _BLOCK or "g_idx" in ref.tensors:
        return False
    if ref.format in {"fp8", *_INT8}:
        known = block == _BLOCK if ref.format == "fp8" else block % _BLOCK == 0
        return "zero_point" not in ref.tensors and (known or block >= columns)
    if ref.format in _NVFP4:
        return block == _FP4_GROUP
    grouped = block in _SMALL_GROUPS or block % _BLOCK == 0
    return ref.format in _INT4 and grouped and ref.tensors["scale"].dtype != "F32"


def expert_kernels_take(ref: QuantisedRef) -> bool:
    """Return whether our CUDA kernels multiply the weight of an expert as stored: FP8 and INT4."""
    aligned = all(size % _BLOCK == 0 for size in ref.shape)
    return aligned and kind_of(ref) in {"fp8", "int4"} and kernels_take(ref)


def builders_take(ref: QuantisedRef) -> bool:
    """Return whether a builder of TensorRT for RTX takes the weight as stored: INT4 in groups of up
    to 128 columns, INT8 and FP8 by row or tensor, all without zero points.
    """
    if {"g_idx", "zero_point"} & ref.tensors.keys():
        return False
    if ref.format in {"fp8", "int8"}:
        return ref.block[1] >= ref.shape[1]
    return ref.format == "int4_packed" and ref.block[1] <= _BLOCK


def matmul_nbits_takes(ref: QuantisedRef) -> bool:
    """Return whether ONNX Runtime multiplies the weight: INT4 and INT8, in column order."""
    return "g_idx" not in ref.tensors and ref.format in _INT4 | _INT8
