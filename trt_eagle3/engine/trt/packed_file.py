"""Quantised weights of an exported graph that stay packed: the file of their bytes, and the graph
that reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import IO

import onnx
import torch
from onnx import TensorProto
from torch import Tensor

from trt_eagle3.graph.trt_export import TrtExport

__all__ = [
    "PACKED_FILE",
    "PackedFile",
    "is_product",
    "packed_counts",
    "packing_device",
    "with_packed",
    "words",
]

PACKED_FILE = "packed.bin"
_ALIGNMENT = 256
_KINDS = {TensorProto.INT4: "int4", TensorProto.INT8: "int8", TensorProto.FLOAT8E4M3FN: "fp8"}
_PLUGINS = {  # type of its weights, and their number
    "LinearFp8": ("fp8", 1),
    "LinearInt8": ("int8", 1),
    "LinearInt4": ("int4", 1),
    "FusedMoeFp8": ("fp8", 2),
    "FusedMoeInt4": ("int4", 2),
}


class PackedFile:
    """Writes ``PACKED_FILE`` and collects the tensors that refer to it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.tensors: list[TensorProto] = []

    def add(self, tensor: TensorProto, data: bytes) -> str:
        """Append ``data`` to the file as the content of ``tensor``; return the tensor's name."""
        stream = self._stream
        stream.seek(-(-stream.tell() // _ALIGNMENT) * _ALIGNMENT)
        place = {"location": PACKED_FILE, "offset": stream.tell(), "length": len(data)}
        stream.write(data)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        self.tensors.append(tensor)
        return str(tensor.name)

    def add_tensor(self, name: str, kind: int, values: Tensor) -> str:
        """Append ``values`` as a tensor of ``kind`` (``TensorProto``); return its name."""
        data = values.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return self.add(TensorProto(name=name, data_type=kind, dims=values.shape), data)


def words(file: PackedFile, name: str, values: Tensor, width: int) -> str:
    """Append the bytes of ``values`` as int32 [.., width], or of three axes if ``values`` has
    three; return the tensor's name.
    """
    whole = values.contiguous().flatten().view(torch.uint8).view(torch.int32)
    leading = values.shape[:1] if values.ndim == 3 else ()
    return file.add_tensor(name, TensorProto.INT32, whole.view(*leading, -1, width))


def packing_device() -> torch.device:
    """Return the device for reordering bytes: a GPU is many times faster."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def is_product(node: onnx.NodeProto) -> bool:
    """Return whether ``node`` multiplies its first input with the transpose of its second."""
    return node.op_type == "Linear" or (
        node.op_type == "Gemm" and any(a.name == "transB" and a.i == 1 for a in node.attribute)
    )


def with_packed(
    ready: TrtExport,
    nodes: Sequence[onnx.NodeProto],
    tensors: Sequence[TensorProto],
    packed: Collection[str],
) -> TrtExport:
    """Return ``ready`` with ``nodes``, and with ``tensors`` instead of the weights ``packed``."""
    model = onnx.ModelProto()
    model.CopyFrom(ready.model)
    kept = [proto for proto in model.graph.initializer if proto.name not in packed]
    for field, values in (("initializer", [*kept, *tensors]), ("node", list(nodes))):
        model.graph.ClearField(field)
        getattr(model.graph, field).extend(values)
    weights = {name: expr for name, expr in ready.weights.items() if name not in packed}
    return replace(ready, model=model, weights=weights)


def packed_counts(model: onnx.ModelProto) -> Mapping[str, int]:
    """Count the weights that stay quantised in the engine, by type: fp8, int8 or int4."""
    behind = {node.input[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    kinds = [_KINDS[proto.data_type] for proto in model.graph.initializer if proto.name in behind]
    counts = Counter(kinds)
    for node in model.graph.node:
        if node.op_type in _PLUGINS:
            kind, number = _PLUGINS[node.op_type]
            counts[kind] += number
    return counts
