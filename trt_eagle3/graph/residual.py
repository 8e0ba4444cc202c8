"""The residual stream of a decoder: in the compute type, or in float32 beside a float16 network.

Qwen3-VL's residual stream exceeds float16's range. A float32 stream does not overflow, but the
projections that are added to it are still written in float16. So the wide stream holds 1/64 of the
true value. The weights that write to it carry the factor: ``o_proj``, and ``up_proj``, which the
MLP's inner value and output depend on linearly. A projection may then reach 4.2e6 before it
overflows. With epsilon times the square of the factor, the norm equals that of the true stream:
    RMSNorm(s x; s^2 eps) = s x / sqrt(mean(s^2 x^2) + s^2 eps) = RMSNorm(x; eps)
The factor is a power of two. It is exact in every type except for float16's subnormals (weights
below 4e-3 lose at most 2e-6).
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
    """The type of the residual stream; ``wide`` = float32 at ``WIDE_SCALE``."""

    wide: bool = False

    @property
    def scale(self) -> float:
        """The stream's value of 1: the factor of every weight that writes to it."""
        return WIDE_SCALE if self.wide else 1.0

    def enter(self, b: GraphBuilder, x: Value, name: str) -> Value:
        """Convert ``x`` of the compute type to a value of the stream."""
        if not self.wide:
            return x
        factor = b.constant(np.array(self.scale, dtype=np.float32), "residual_scale")
        return b.op("Mul", b.cast(x, TensorProto.FLOAT, f"{name}_wide"), factor, name=name)

    def leave(self, b: GraphBuilder, x: Value, name: str) -> Value:
        """Convert a value of the stream to the compute type, clipped to float16's range."""
        if not self.wide:
            return x
        factor = b.constant(np.array(1 / self.scale, dtype=np.float32), "residual_unscale")
        bounds = (b.constant(np.array(v, dtype=np.float32), f"residual_{n}") for n, v in _BOUNDS)
        clipped = b.op(
            "Clip", b.op("Mul", x, factor, name=f"{name}_true"), *bounds, name=f"{name}_clipped"
        )
        return b.cast(clipped, b.dtype, name)

    def add(self, b: GraphBuilder, stream: Value, delta: Value, name: str) -> Value:
        """Return ``stream + delta``; ``delta`` (of either type) already has the factor."""
        return b.op("Add", stream, b.cast(delta, stream.dtype, f"{name}_delta"), name=name)

    def norm(
        self, b: GraphBuilder, stream: Value, weight: TensorRef, norm: NormSpec, name: str
    ) -> Value:
        """Compute the RMSNorm of the stream, in the compute type."""
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
        """Return ``(RMSNorm(stream + delta), stream + delta)``, named ``names``."""
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
        """Return the overload and attributes of a norm of the stream."""
        attributes = {"epsilon": norm.eps * self.scale**2}
        if not norm.weight_offset:
            return overload, attributes
        name = f"{overload}_offset" if overload else "offset"
        return name, {**attributes, "weight_offset": norm.weight_offset}


_BOUNDS = (("min", -FLOAT16_MAX), ("max", FLOAT16_MAX))
