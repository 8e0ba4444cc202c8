"""Parts that vision graphs share: products, norms, activations, and attention within frames.

Shapes: n patches of all frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.errors import UserError
from trt_eagle3.graph.builder import GraphBuilder, Value

__all__ = [
    "FrameAttention",
    "activation",
    "axial_attention",
    "layer_norm",
    "linear",
    "patch_embedding",
    "rms_norm",
]

_ROPE_BASE = 10000.0
Tensors = Mapping[str, TensorRef]


def linear(b: GraphBuilder, x: Value, tensors: Tensors, prefix: str, name: str) -> Value:
    """Multiply ``x`` by the weight under ``prefix`` and add its bias."""
    return b.linear(x, [tensors[f"{prefix}.weight"]], [tensors[f"{prefix}.bias"]], name=name)


def patch_embedding(
    b: GraphBuilder, patches: Value, tensors: Tensors, prefix: str, name: str
) -> Value:
    """Embed ``patches [n, C * ...]`` by the weight and, if there is one, the bias under ``prefix``.

    A convolution whose stride equals its kernel is a matrix product.
    """
    weight, bias = tensors[f"{prefix}.weight"], tensors.get(f"{prefix}.bias")
    flat = replace(weight, shape=(weight.shape[0], prod(weight.shape[1:])))
    return b.linear(patches, [flat], [] if bias is None else [bias], name=name)


def layer_norm(
    b: GraphBuilder, x: Value, tensors: Tensors, prefix: str, name: str, epsilon: float
) -> Value:
    """Apply LayerNorm with the weight and the bias under ``prefix``."""
    scale, bias = b.weight(tensors[f"{prefix}.weight"]), b.weight(tensors[f"{prefix}.bias"])
    return b.op("LayerNormalization", x, scale, bias, name=name, axis=-1, epsilon=epsilon)


def rms_norm(
    b: GraphBuilder, x: Value, tensors: Tensors, prefix: str, name: str, epsilon: float
) -> Value:
    """Apply RMSNorm with the weight under ``prefix``."""
    weight = b.weight(tensors[f"{prefix}.weight"])
    return b.own_op("AddRmsNorm", x, weight, names=(name,), dtypes=(b.dtype,), epsilon=epsilon)[0]


def activation(b: GraphBuilder, x: Value, kind: str) -> Value:
    """Apply GELU (exact or tanh) or SiLU."""
    if kind in {"silu", "swish"}:
        return b.op("Mul", x, b.op("Sigmoid", x))
    approximate = {"gelu": "none", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh"}.get(kind)
    if approximate is None:
        raise UserError(
            f"vision_config.hidden_act: expected gelu, gelu_pytorch_tanh or silu, got {kind!r}"
        )
    return b.op("Gelu", x, approximate=approximate)


@dataclass(frozen=True)
class FrameAttention:
    """Attention of each patch over its own frame, with q and k rotated by row and column.

    Attributes:
        positions: int32 [2, n], row and column of each patch.
        inv_freq, pair_axis: float32 and int32 [D / 2], frequency and axis of each channel pair.
    """

    num_heads: int
    head_dim: int
    positions: Value
    inv_freq: Value
    pair_axis: Value

    def emit(self, b: GraphBuilder, qkv: Value, starts: Value) -> Value:
        """Compute ``qkv [n, 3 * H * D]`` -> ``[n, H * D]``; ``starts``: frames, int32 [F + 1]."""
        return b.own_op(
            "VisionAttention",
            qkv,
            self.positions,
            self.inv_freq,
            self.pair_axis,
            starts,
            names=("attended",),
            num_heads=self.num_heads,
            scale=float(np.float32(self.head_dim**-0.5)),
        )[0]


def axial_attention(b: GraphBuilder, num_heads: int, head_dim: int) -> FrameAttention:
    """Create attention whose first half of pairs rotates by row, the second by column.

    Declares ``rope_positions`` int32 [2, n].
    """
    inv_freq, pair_axis = _rotation(head_dim)
    return FrameAttention(
        num_heads,
        head_dim,
        b.input("rope_positions", TensorProto.INT32, (2, "patches")),
        b.constant(inv_freq, "vision_inv_freq"),
        b.constant(pair_axis, "vision_pair_axis"),
    )


def _rotation(head_dim: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Return frequencies f32 [D/2] and axes i32 [D/2].

    The first half of the pairs rotates by row, the second by column.
    """
    half = head_dim // 2
    exponents = np.arange(0, half, 2, dtype=np.float32) / np.float32(half)
    quarter = (1.0 / _ROPE_BASE**exponents).astype(np.float32)
    return np.concatenate([quarter, quarter]), np.repeat(np.arange(2, dtype=np.int32), len(quarter))
