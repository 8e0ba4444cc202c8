"""Quantised weights that stay packed in an engine, behind a ``DequantizeLinear`` node. A builder
fuses that node with the product, and reads the numbers as stored.

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
from trt_eagle3.dtype import COMPUTE_DTYPES, LARGEST_FP8, DType
from trt_eagle3.engine.runtime.weights import integer_rows, mapped
from trt_eagle3.engine.torch.pack import fp8_scales
from trt_eagle3.engine.trt.packed_experts import pack_mixtures
from trt_eagle3.engine.trt.packed_file import (
    PACKED_FILE,
    PackedFile,
    is_product,
    with_packed,
)
from trt_eagle3.graph.formats.format import IntegerFormat, IntegerRows
from trt_eagle3.graph.trt_export import TrtExport
from trt_eagle3.graph.weight_formats import WEIGHT_FORMATS
from trt_eagle3.graph.weights import WeightExpr, WeightPart

__all__ = ["DequantizeLinearWeight", "keep_packed"]

_OPSET, _IR_VERSION = 24, 11  # the first with INT4 and blocks of DequantizeLinear
_MOST_COLUMNS = 128  # of a group; builders dequantise weights with larger groups
_CODES, _SCALES = "/codes", "/scales"
_SCALE_TYPES = {dtype.torch: dtype.onnx for dtype in COMPUTE_DTYPES}


@dataclass(frozen=True)
class DequantizeLinearWeight:
    """A weight in the form of ``DequantizeLinear``.

    Attributes:
        kind: of ``TensorProto``: INT4, INT8 or FLOAT8E4M3FN. codes: [out, in], int8 about zero, or
            the bytes of FP8. scales: [out, G] in the compute type; for FP8 float32 [out, 1].
    """

    kind: int
    codes: Tensor
    scales: Tensor

    @property
    def columns(self) -> int:
        """Columns of a group."""
        return self.codes.shape[1] // self.scales.shape[1]

    def code_bytes(self) -> bytes:
        """Return the codes, row-major. 4-bit codes are two to a byte, the first in the low half."""
        if self.kind != TensorProto.INT4:
            return bytes(self.codes.contiguous().view(torch.uint8).numpy())
        pairs = (self.codes & 15).to(torch.uint8).unflatten(1, (-1, 2))
        return bytes((pairs[..., 0] | pairs[..., 1] << 4).numpy())

    def scale_bytes(self) -> bytes:
        """Return the scales, row-major."""
        return bytes(self.scales.contiguous().view(torch.uint8).numpy())


def keep_packed(ready: TrtExport, root: Path, folder: Path, *, fp8: bool = False) -> TrtExport:
    """Move the weights that a builder can use as stored to ``folder / PACKED_FILE``, behind
    ``DequantizeLinear`` nodes, and experts that our plugins support into these plugins' nodes.
    Returns ``ready`` itself if there are none.

    Supported are INT4 in groups of up to 128 columns, INT8 with a scale per row, and FP8 with a
    scale per row or tensor. There must be no zero points, and columns must be in order. Every
    reader of a weight must be a product. The compute type must hold its values, and hold the scales
    of integers as normal numbers.

    Args:
        root: folder of the weights' files. One weight at a time is in memory.
        fp8: whether every chip of the engine has FP8.
    """
    products = _products(ready.model)
    nodes: dict[str, onnx.NodeProto] = {}
    with atomic_file(folder / PACKED_FILE) as stream:
        file = PackedFile(stream)
        mixtures, experts = pack_mixtures(ready, root, file)
        for name, expr in ready.weights.items():
            packed = _packed(expr, root, fp8) if name in products else None
            if packed is not None:
                inputs = [file.add(*one) for one in _tensors(name, packed)]
                nodes[name] = _node(name, inputs, packed, expr.dtype)
    if not nodes and not mixtures:
        (folder / PACKED_FILE).unlink()
        return ready
    others = [mixtures.get(node.output[0], node) for node in ready.model.graph.node]
    made = with_packed(ready, [*nodes.values(), *others], file.tensors, [*nodes, *experts])
    if not nodes:
        return made
    made.model.ir_version = _IR_VERSION
    next(opset for opset in made.model.opset_import if not opset.domain).version = _OPSET
    return made


def _products(model: onnx.ModelProto) -> set[str]:
    """Return the weights [out, in] that only products with their transpose read."""
    weights: set[str] = set()
    others: set[str] = set()
    for node in model.graph.node:
        product = node.op_type == "Gemm" and is_product(node)
        for at, name in enumerate(node.input):
            (weights if product and at == 1 else others).add(name)
    return weights - others


def _packed(expr: WeightExpr, root: Path, fp8: bool) -> DequantizeLinearWeight | None:
    form = WEIGHT_FORMATS.get(expr.format)
    if isinstance(form, IntegerFormat):
        return _packed_integers(expr, form.bits, root)
    return _packed_fp8(expr, root) if fp8 and expr.format == "fp8" else None


def _packed_integers(expr: WeightExpr, bits: int, root: Path) -> DequantizeLinearWeight | None:
    parts = [_part(expr, part, bits, root) for part in expr.parts]
    rows = [part for part in parts if part is not None]
    if len(rows) < len(parts) or len({scales.shape[1] for _, scales in rows}) > 1:
        return None
    codes, wide = (torch.cat(side) for side in zip(*rows, strict=True))
    scales = wide.to(expr.dtype.torch)
    normal = bool((scales.float().abs() >= torch.finfo(scales.dtype).tiny).all())
    packed = DequantizeLinearWeight(
        TensorProto.INT4 if bits == 4 else TensorProto.INT8, codes, scales
    )
    return packed if normal and bool(scales.isfinite().all()) and _is_taken(packed) else None


def _packed_fp8(expr: WeightExpr, root: Path) -> DequantizeLinearWeight | None:
    """Pack FP8; None if scales change along a row, as a builder would dequantise that weight."""
    cpu = torch.device("cpu")
    grids = [fp8_scales(part, root, cpu) for part in expr.parts]
    scales = [grid for grid in grids if grid is not None and grid.shape[1] == 1]
    if len(scales) < len(grids):
        return None
    whole, largest = torch.cat(scales), torch.finfo(expr.dtype.torch).max
    if not float(whole.abs().max()) * LARGEST_FP8 <= largest:
        return None
    codes = [_fp8_codes(part, root) for part in expr.parts]
    return DequantizeLinearWeight(TensorProto.FLOAT8E4M3FN, torch.cat(codes), whole)


def _fp8_codes(part: WeightPart, root: Path) -> Tensor:
    """Return the bytes of e4m3 numbers: uint8 [rows, in]."""
    stored = next(tensor for tensor in part.stored if tensor.role == "codes")
    return mapped(stored, root)[slice(*part.row_range)].view(torch.uint8)


def _part(
    expr: WeightExpr, part: WeightPart, bits: int, root: Path
) -> tuple[Tensor, Tensor] | None:
    """Return numbers about zero int8 [rows, in] and scales float32 [rows, G]. Returns None for
    other zero points, or if the columns are not in order.
    """
    taken, middle = slice(*part.row_range), 1 << (bits - 1)
    whole: IntegerRows = integer_rows(expr, part, root)
    columns = whole.codes.shape[1] // whole.scales.shape[1]
    in_order = torch.equal(whole.groups, torch.arange(whole.codes.shape[1]) // columns)
    if not in_order or bool((whole.zeros[taken] != middle).any()):
        return None
    codes = (whole.codes[taken].short() - middle).to(torch.int8)
    return codes, whole.scales[taken] * part.scale


def _is_taken(packed: DequantizeLinearWeight) -> bool:
    """Return whether builders have a product for the weight's groups."""
    inner = packed.codes.shape[1]
    if inner % packed.scales.shape[1] or inner % 2:
        return False
    grouped = packed.kind == TensorProto.INT4
    return packed.columns <= _MOST_COLUMNS if grouped else packed.columns == inner


def _tensors(name: str, weight: DequantizeLinearWeight) -> list[tuple[TensorProto, bytes]]:
    codes = TensorProto(name=name + _CODES, data_type=weight.kind, dims=weight.codes.shape)
    grouped = weight.kind == TensorProto.INT4
    shape = weight.scales.shape if grouped else weight.scales.shape[:1]
    scales = TensorProto(
        name=name + _SCALES, data_type=_SCALE_TYPES[weight.scales.dtype], dims=shape
    )
    return [(codes, weight.code_bytes()), (scales, weight.scale_bytes())]


def _node(
    name: str, inputs: list[str], weight: DequantizeLinearWeight, dtype: DType
) -> onnx.NodeProto:
    options = {"axis": 0}
    if weight.kind == TensorProto.INT4:
        options = {"axis": 1, "block_size": weight.columns}
    if weight.scales.dtype != dtype.torch:
        options["output_dtype"] = dtype.onnx
    return helper.make_node(
        "DequantizeLinear", inputs, [name], name=f"{name}/DequantizeLinear", **options
    )
