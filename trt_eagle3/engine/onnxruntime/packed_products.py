"""Products with integer weights by ONNX Runtime's own kernel: ``MatMulNBits`` on packed numbers.

At accuracy level 4, the kernel rounds the rows of x to int8, with a scale for each block of
columns, and multiplies integers. Level 0 keeps x in float32 and is no faster than a float32 product
(docs/measurements.md). So weights are dequantised at load unless activations are int8.

Shapes: N outputs, K inputs, G blocks of columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, helper

from trt_eagle3.graph.formats.format import IntegerFormat, IntegerRows
from trt_eagle3.graph.weight_formats import WEIGHT_FORMATS
from trt_eagle3.graph.weight_nodes import Arrays, Unpack, array_initializer
from trt_eagle3.graph.weights import (
    METADATA_KEY,
    WeightExpr,
    WeightPart,
    descriptions,
    write_descriptions,
)

__all__ = ["with_packed_products"]

_DOMAIN, _ACCURACY = "com.microsoft", 4
_BLOCKS = (128, 64, 32, 16, 256)
"""Block sizes of the kernel, in the order of preference."""
_MIDDLE = {4: 8, 8: 128}
"""The zero point of a weight that has none, by bits."""


@dataclass(frozen=True)
class _Packed:
    """A weight in the form of ``MatMulNBits``.

    Attributes:
        bits, block: bits of a number, and columns that share a scale. shape: [N, K].
        arrays: codes uint8 [N, G, block * bits / 8], scales float32 [N * G], and zero points uint8
            [N, G * bits / 8] if there are any.
    """

    bits: int
    block: int
    shape: tuple[int, int]
    arrays: Mapping[str, NDArray[Any]]


def with_packed_products(model: onnx.ModelProto, unpack: Unpack) -> tuple[onnx.ModelProto, Arrays]:
    """Use ``MatMulNBits`` for every product whose weight the kernel can read.

    Returns:
        a changed copy of ``model``, and the packed weights by initializer name.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    described, arrays = descriptions(model), dict[str, NDArray[Any]]()
    packed: dict[str, _Packed | None] = {}
    for node in made.graph.node:
        name = node.input[1] if _is_product(node) else ""
        if name in described and name not in packed:
            packed[name] = _packed(described[name], unpack)
        weight = packed.get(name)
        if weight is not None:
            _rewrite(node, name, weight)
            arrays |= {f"{name}/{key}": array for key, array in weight.arrays.items()}
    _remove_unused(made, described)
    made.graph.initializer.extend(array_initializer(name, array) for name, array in arrays.items())
    if arrays:
        made.opset_import.add(domain=_DOMAIN, version=1)
    return made, arrays


def _is_product(node: NodeProto) -> bool:
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return node.op_type == "Gemm" and not node.domain and attributes == {"transB": 1}


def _rewrite(node: NodeProto, name: str, weight: _Packed) -> None:
    """Turn a Gemm of x, weight and an optional bias into a ``MatMulNBits``, in place."""
    x, _, *bias = node.input
    zeros = f"{name}/zero_points" if "zero_points" in weight.arrays else ""
    inputs = [x, f"{name}/codes", f"{name}/scales", zeros, "", *bias]
    while not inputs[-1]:
        inputs.pop()
    rows, columns = weight.shape
    sizes = {"N": rows, "K": columns, "bits": weight.bits, "block_size": weight.block}
    new = helper.make_node(
        "MatMulNBits",
        inputs,
        list(node.output),
        name=node.name,
        domain=_DOMAIN,
        accuracy_level=_ACCURACY,
        **sizes,
    )
    node.CopyFrom(new)


def _remove_unused(model: onnx.ModelProto, described: Mapping[str, WeightExpr]) -> None:
    """Remove weights that no node reads any more from the graph and its metadata."""
    used = {name for node in model.graph.node for name in node.input}
    kept = [p for p in model.graph.initializer if p.name in used or p.name not in described]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    others = [entry for entry in model.metadata_props if entry.key != METADATA_KEY]
    del model.metadata_props[:]
    model.metadata_props.extend(others)
    write_descriptions(model, {name: e for name, e in described.items() if name in used})


def _packed(expr: WeightExpr, unpack: Unpack) -> _Packed | None:
    """Pack the weight for the kernel; None if the kernel cannot read it."""
    form = WEIGHT_FORMATS.get(expr.format)
    blocks = {_block(part) for part in expr.parts}
    block = next(iter(blocks))
    if not isinstance(form, IntegerFormat) or len(blocks) != 1 or block is None:
        return None
    parts = [_taken(part, unpack(expr, part), block) for part in expr.parts]
    codes, zeros, scales = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    arrays = {
        "codes": _in_bytes(codes, form.bits).reshape(len(codes), scales.shape[1], -1),
        "scales": scales.reshape(-1),
    }
    if (zeros != _MIDDLE[form.bits]).any():
        arrays["zero_points"] = _in_bytes(zeros, form.bits)
    return _Packed(form.bits, block, (codes.shape[0], codes.shape[1]), arrays)


def _block(part: WeightPart) -> int | None:
    """Return the columns of a supported block that divides the part's groups; None without one."""
    quantised = part.quantised
    if quantised is None or any(t.role == "g_idx" for t in quantised.tensors):
        return None
    group, columns = quantised.block[1], quantised.shape[1]
    if group in _BLOCKS and columns % group == 0:
        return group
    whole = group >= columns
    return next((b for b in _BLOCKS if whole and columns % b == 0), None)


def _taken(part: WeightPart, rows: IntegerRows, block: int) -> tuple[NDArray[Any], ...]:
    """Return codes [n, K], zero points [n, G] and scales [n, G] of the weight's rows."""
    first, end = part.row_range
    repeats = rows.codes.shape[1] // block // rows.scales.shape[1]
    zeros = rows.zeros[first:end].repeat_interleave(repeats, dim=1)
    scales = (rows.scales[first:end] * part.scale).repeat_interleave(repeats, dim=1)
    return rows.codes[first:end].numpy(), zeros.numpy(), scales.numpy()


def _in_bytes(numbers: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack numbers [n, m] as uint8 [n, ceil(m * bits / 8)], the low half of a byte first."""
    if bits == 8:
        return np.ascontiguousarray(numbers)
    padded = np.pad(numbers, ((0, 0), (0, numbers.shape[1] % 2)))
    return (padded[:, 0::2] | padded[:, 1::2] << 4).astype(np.uint8)
