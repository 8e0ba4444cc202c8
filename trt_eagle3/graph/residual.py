"""The residual stream of a decoder: in the compute type, or in float32 beside a float16 network.

Qwen3-VL's residual stream leaves float16's range. Held in float32 it does not, but what the
projections add to it is still written in float16. So the wide stream holds 1/64 of the true value:
the weights that write to it (``o_proj``, and ``up_proj``, on which the MLP's inner value and output
both depend linearly) carry the factor, and a projection may reach 4.2e6 before it overflows. The
norm of a scaled stream, epsilon times its square, is that of the true one:
    RMSNorm(s x; s^2 eps) = s x / sqrt(mean(s^2 x^2) + s^2 eps) = RMSNorm(x; eps)
The factor is a power of two, exact in every type but for float16's subnormals (weights below 4e-3
lose at most 2e-6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.graph.builder import GraphBuilder, Value
from trt_eagle3.spec import NormSpec

__all__ = ["FLOAT16_MAX", "WIDE_SCALE", "Residual"]

FLOAT16_MAX = 65504.0
WIDE_SCALE = 1 / 64


@dataclass(frozen=True)
class Residual:
    """How the stream is held; ``wide`` = float32 at ``WIDE_SCALE``."""

    wide: bool = False

    @property
    def scale(self) -> float:
        """What stands in the stream for 1; the factor of every weight that writes to it."""
        return WIDE_SCALE if self.wide else 1.0

    def enter(self, b: GraphBuilder, x: Value, name: str) -> Value:
        """``x`` of the compute type as a value of the stream."""
        if not self.wide:
            return x
        factor = b.constant(np.array(self.scale, dtype=np.float32), "residual_scale")
        return b.op("Mul", b.cast(x, TensorProto.FLOAT, f"{name}_wide"), factor, name=name)

    def leave(self, b: GraphBuilder, x: Value, name: str) -> Value:
        """A value of the stream in the compute type; what float16 cannot hold becomes its
        largest.
        """
        if not self.wide:
            return x
        factor = b.constant(np.array(1 / self.scale, dtype=np.float32), "residual_unscale")
        bounds = (b.constant(np.array(v, dtype=np.float32), f"residual_{n}") for n, v in _BOUNDS)
        clipped = b.op(
            "Clip", b.op("Mul", x, factor, name=f"{name}_true"), *bounds, name=f"{name}_clipped"
        )
        return b.cast(clipped, b.dtype, name)

    def add(self, b: GraphBuilder, stream: Value, delta: Value, name: str) -> Value:
        """``stream + delta``, where ``delta`` (of either type) carries the factor already."""
        return b.op("Add", stream, b.cast(delta, stream.dtype, f"{name}_delta"), name=name)

    def norm(
        self, b: GraphBuilder, stream: Value, weight: TensorRef, norm: NormSpec, name: str
    ) -> Value:
        """RMSNorm of the stream, in the compute type."""
        overload, attributes = self._form("", norm)
        return b.own_op(
            "AddRmsNorm",
            stream,
            b.weight(weight),
            names=(name,),
            overload=overload,
            dtypes=(b.dtype,),
            **attributes,
        )[0]

    def add_norm(
        self,
        b: GraphBuilder,
        delta: Value,
        stream: Value,
        weight: TensorRef,
        norm: NormSpec,
        names: Sequence[str],
    ) -> tuple[Value, Value]:
        """``(RMSNorm(stream + delta), stream + delta)``, called ``names``."""
        overload, attributes = self._form("residual", norm)
        y, total = b.own_op(
            "AddRmsNorm",
            *(delta, b.weight(weight), stream),
            names=names,
            overload=overload,
            dtypes=(b.dtype, stream.dtype),
            **attributes,
        )
        return y, total

    def _form(self, overload: str, norm: NormSpec) -> tuple[str, dict[str, float]]:
        """The overload and attributes of a norm of the stream."""
        attributes = {"epsilon": norm.eps * self.scale**2}
        if not norm.weight_offset:
            return overload, attributes
        name = f"{overload}_offset" if overload else "offset"
        return name, {**attributes, "weight_offset": norm.weight_offset}


_BOUNDS = (("min", -FLOAT16_MAX), ("max", FLOAT16_MAX))
