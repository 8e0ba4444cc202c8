"""Weights of whole numbers that stay so in an engine: behind a ``DequantizeLinear``, with which a
builder computes the product on the numbers as they are.

Shapes: a weight [out, in], G groups of columns of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

from trt_eagle3.atomic_io import atomic_file
from trt_eagle3.dtype import DType
from trt_eagle3.engine.trt.packed_file import PACKED_FILE, PackedFile, is_product, with_packed
from trt_eagle3.engine.weights import integer_rows
from trt_eagle3.graph.formats.format import IntegerFormat, IntegerRows
from trt_eagle3.graph.trt_export import TrtExport
from trt_eagle3.graph.weight_formats import WEIGHT_FORMATS
from trt_eagle3.graph.weights import WeightExpr, WeightPart

__all__ = ["PackedWeight", "keep_packed"]

_OPSET, _IR_VERSION = 24, 11  # that have INT4 and blocks of DequantizeLinear
_MOST_COLUMNS = 128  # of a group: more are made values of by the builder
_CODES, _SCALES = "/codes", "/scales"


@dataclass(frozen=True)
class PackedWeight:
    """A weight as ``DequantizeLinear`` has it.

    Attributes:
        bits: 4 or 8. codes: int8 [out, in], about zero. scales: [out, G] in the compute type.
    """

    bits: int
    codes: Tensor
    scales: Tensor

    @property
    def columns(self) -> int:
        """Of a group."""
        return self.codes.shape[1] // self.scales.shape[1]

    def code_bytes(self) -> bytes:
        """Row-major; of four bits two in a byte, the lower half first."""
        if self.bits == 8:
            return bytes(self.codes.numpy())
        pairs = (self.codes & 15).to(torch.uint8).unflatten(1, (-1, 2))
        return bytes((pairs[..., 0] | pairs[..., 1] << 4).numpy())

    def scale_bytes(self) -> bytes:
        """Row-major."""
        return bytes(self.scales.contiguous().view(torch.uint8).numpy())


def keep_packed(ready: TrtExport, root: Path, folder: Path) -> TrtExport:
    """``ready`` with the weights that a builder can compute with as they are stored in ``folder /
    PACKED_FILE``, behind ``DequantizeLinear`` nodes; ``ready`` itself where there is none.

    They are of INT4 in groups of up to 128 columns, or of INT8 with a scale per row; without zero
    points and in the order of their columns; every reader of one is a product; and its compute
    type holds its scales as normal numbers.

    Args:
        root: of the weights' files. One weight at a time is in memory.
    """
    products, form = _products(ready.model), WEIGHT_FORMATS
    wanted = [
        name
        for name, expr in ready.weights.items()
        if name in products and isinstance(form.get(expr.format), IntegerFormat)
    ]
    if not wanted:
        return ready
    nodes: dict[str, onnx.NodeProto] = {}
    with atomic_file(folder / PACKED_FILE) as stream:
        file = PackedFile(stream)
        for name in wanted:
            expr = ready.weights[name]
            if (packed := _packed(expr, root)) is not None:
                inputs = [file.add(*one) for one in _tensors(name, packed, expr.dtype)]
                nodes[name] = _node(name, inputs, packed)
    made = with_packed(ready, [*nodes.values(), *ready.model.graph.node], file.tensors, nodes)
    made.model.ir_version = _IR_VERSION
    next(opset for opset in made.model.opset_import if not opset.domain).version = _OPSET
    return made


def _products(model: onnx.ModelProto) -> set[str]:
    """Weights [out, in] that nothing but products with their transpose reads."""
    weights: set[str] = set()
    others: set[str] = set()
    for node in model.graph.node:
        product = node.op_type == "Gemm" and is_product(node)
        for at, name in enumerate(node.input):
            (weights if product and at == 1 else others).add(name)
    return weights - others


def _packed(expr: WeightExpr, root: Path) -> PackedWeight | None:
    form = WEIGHT_FORMATS[expr.format]
    assert isinstance(form, IntegerFormat), expr.format
    parts = [_part(expr, part, form.bits, root) for part in expr.parts]
    rows = [part for part in parts if part is not None]
    if len(rows) < len(parts) or len({scales.shape[1] for _, scales in rows}) > 1:
        return None
    codes, wide = (torch.cat(side) for side in zip(*rows, strict=True))
    scales = wide.to(expr.dtype.torch)
    normal = bool((scales.float().abs() >= torch.finfo(scales.dtype).tiny).all())
    packed = PackedWeight(form.bits, codes, scales)
    return packed if normal and bool(scales.isfinite().all()) and _is_taken(packed) else None


def _part(
    expr: WeightExpr, part: WeightPart, bits: int, root: Path
) -> tuple[Tensor, Tensor] | None:
    """Numbers about zero int8 [rows, in] and scales float32 [rows, G]; None where zero points or
    the order of columns say otherwise.
    """
    taken, middle = slice(*part.row_range), 1 << (bits - 1)
    whole: IntegerRows = integer_rows(expr, part, root)
    columns = whole.codes.shape[1] // whole.scales.shape[1]
    in_order = torch.equal(whole.groups, torch.arange(whole.codes.shape[1]) // columns)
    if not in_order or bool((whole.zeros[taken] != middle).any()):
        return None
    codes = (whole.codes[taken].short() - middle).to(torch.int8)
    return codes, whole.scales[taken] * part.scale


def _is_taken(packed: PackedWeight) -> bool:
    """Whether builders have a product for its groups."""
    inner = packed.codes.shape[1]
    if inner % packed.scales.shape[1] or inner % 2:
        return False
    return packed.columns == inner if packed.bits == 8 else packed.columns <= _MOST_COLUMNS


def _tensors(name: str, weight: PackedWeight, dtype: DType) -> list[tuple[TensorProto, bytes]]:
    kind = TensorProto.INT4 if weight.bits == 4 else TensorProto.INT8
    codes = TensorProto(name=name + _CODES, data_type=kind, dims=weight.codes.shape)
    rows = weight.bits == 8
    shape = weight.scales.shape[:1] if rows else weight.scales.shape
    scales = TensorProto(name=name + _SCALES, data_type=dtype.onnx, dims=shape)
    return [(codes, weight.code_bytes()), (scales, weight.scale_bytes())]


def _node(name: str, inputs: list[str], weight: PackedWeight) -> onnx.NodeProto:
    options = {"axis": 0} if weight.bits == 8 else {"axis": 1, "block_size": weight.columns}
    return helper.make_node(
        "DequantizeLinear", inputs, [name], name=f"{name}/DequantizeLinear", **options
    )
