"""Weight formats: how a weight's numbers are stored, read, and used in a graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from trt_eagle3.checkpoint.tensor_index import FLOAT_DTYPES, TensorRef
from trt_eagle3.errors import UserError
from trt_eagle3.graph.weights import WeightPart

if TYPE_CHECKING:
    from onnx import NodeProto
    from torch import Tensor

    from trt_eagle3.graph.builder import GraphBuilder, Value

__all__ = ["WEIGHT_FORMATS", "DenseFormat", "WeightFormat"]


class WeightFormat(Protocol):
    """One way in which checkpoints store weights. Formats have no state."""

    def check(self, ref: TensorRef) -> None:
        """Refuse a tensor that is not of this format.

        Raises:
            UserError: naming the tensor and what was expected.
        """
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

    def check(self, ref: TensorRef) -> None:
        if ref.dtype not in FLOAT_DTYPES:
            raise UserError(
                f"{ref.file.name}: {ref.name}: expected a float32, float16 or bfloat16 tensor, got "
                f"{ref.dtype}. Use the unquantised checkpoint."
            )

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
