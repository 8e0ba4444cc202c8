"""Forms of quantised weights that are multiplied as they are stored, as far as a checkpoint's
index tells; ``engine/torch/packed.py``, ``engine/trt`` and ONNX Runtime's ``MatMulNBits`` decide.
"""

from __future__ import annotations

from trt_eagle3.checkpoint.quantised.weight import QuantisedRef

__all__ = ["builders_take", "kernels_take", "kind_of", "matmul_nbits_takes"]

_INT4 = frozenset({"int4_packed", "awq", "gptq", "gptq_v2"})
_INT8 = frozenset({"int8", "int8_packed"})
_NVFP4 = frozenset({"nvfp4", "nvfp4_divided"})
_BLOCK, _ROWS = 128, 16
_SMALL_GROUPS, _FP4_GROUP = (32, 64), 16


def kind_of(ref: QuantisedRef) -> str:
    """As ``engine.weights`` calls it: ``fp8``, ``int8``, ``int4``; another's own name."""
    return "int4" if ref.format in _INT4 else ref.format.removesuffix("_packed")


def kernels_take(ref: QuantisedRef) -> bool:
    """Whether our CUDA kernels multiply it: FP8 and INT8 without zero points by row, tensor or 128
    columns (INT8 a multiple); INT4 in groups of 32, 64 or a multiple of 128 columns; NVFP4.
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


def builders_take(ref: QuantisedRef) -> bool:
    """Whether a builder of TensorRT for RTX does: INT4 in groups of up to 128 columns, INT8 and FP8
    by row or tensor, none with zero points.
    """
    if {"g_idx", "zero_point"} & ref.tensors.keys():
        return False
    if ref.format in {"fp8", "int8"}:
        return ref.block[1] >= ref.shape[1]
    return ref.format == "int4_packed" and ref.block[1] <= _BLOCK


def matmul_nbits_takes(ref: QuantisedRef) -> bool:
    """Whether ONNX Runtime does: INT4 and INT8, in the order of their columns."""
    return "g_idx" not in ref.tensors and ref.format in _INT4 | _INT8
