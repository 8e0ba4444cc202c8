"""Weight formats: how a weight's numbers are stored, read, and used in a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from trt_eagle3.checkpoint.tensor_index import FLOAT_DTYPES, TensorRef
from trt_eagle3.errors import UserError
from trt_eagle3.graph.weights import WeightPart

if TYPE_CHECKING:
    from onnx import NodeProto
    from torch import Tensor

    from trt_eagle3.graph.builder import GraphBuilder, Value

__all__ = ["WEIGHT_FORMATS", "DenseFormat", "WeightFormat", "format_of"]


class WeightFormat(Protocol):
    """One way in which checkpoints store weights. Formats have no state."""

    def takes(self, ref: TensorRef) -> bool:
        """Whether the tensor at ``ref`` is one of this format."""
        ...

    def tensors(self, part: WeightPart) -> tuple[WeightPart, ...]:
        """The tensors on disk that ``part`` is read from; scales of a quantised one among them."""
        ...

    def dequantise(self, part: WeightPart, stored: Tensor) -> Tensor:
        """The values of ``stored``, consecutive rows of ``part``, in a floating type that holds
        them.
        """
        ...

    def dequantise_nodes(self, part: WeightPart, stored: str) -> list[NodeProto]:
        """Standard nodes that compute ``dequantise`` of the tensor ``stored``; none where it is the
        values.
        """
        ...

    def linear(
        self, b: GraphBuilder, x: Value, weight: Value, bias: Value | None, name: str
    ) -> Value:
        """Add the nodes of ``x [n, in] @ weight [out, in].T + bias [out]``."""
        ...


class DenseFormat:
    """Plain floating numbers, one tensor a weight."""

    def takes(self, ref: TensorRef) -> bool:
        return ref.dtype in FLOAT_DTYPES

    def tensors(self, part: WeightPart) -> tuple[WeightPart, ...]:
        return (part,)

    def dequantise(self, part: WeightPart, stored: Tensor) -> Tensor:
        del part
        return stored

    def dequantise_nodes(self, part: WeightPart, stored: str) -> list[NodeProto]:
        del part, stored
        return []

    def linear(
        self, b: GraphBuilder, x: Value, weight: Value, bias: Value | None, name: str
    ) -> Value:
        biases = () if bias is None else (bias,)
        return b.op("Gemm", x, weight, *biases, name=name, transB=1)


WEIGHT_FORMATS: Mapping[str, WeightFormat] = {"dense": DenseFormat()}


def format_of(refs: Sequence[TensorRef]) -> str:
    """The name of the format that all of ``refs`` are stored in.

    Raises:
        UserError: one is of none, or of another than the first.
    """
    names = [_format_of(ref) for ref in refs]
    other = next((ref for ref, name in zip(refs, names, strict=True) if name != names[0]), None)
    if other is not None:
        raise UserError(
            f"{other.file.name}: {other.name}: expected weight format {names[0]} as {refs[0].name}"
        )
    return names[0]


def _format_of(ref: TensorRef) -> str:
    name = next((name for name, form in WEIGHT_FORMATS.items() if form.takes(ref)), None)
    if name is None:
        raise UserError(
            f"{ref.file.name}: {ref.name}: expected a float32, float16 or bfloat16 tensor, got "
            f"{ref.dtype}. Use the unquantised checkpoint."
        )
    return name
