"""The vision graph: Qwen3-VL's tower over packed patches of any number of images and frames.

Shapes: n patches of all frames, N = n / merge**2 visual tokens, F frames, L patches of the longest frame, L_ds levels.
Equations: transformers ``modeling_qwen3_vl.py`` (Qwen3VLVisionModel).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto

from trt_eagle3.checkpoint.target import TargetSpec, VisionSpec
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.errors import UserError
from trt_eagle3.graph.builder import GraphBuilder, Locate, Value

__all__ = ["VISION_INPUTS", "vision_graph"]

VISION_INPUTS = (
    "patches",
    "pos_embed_rows",
    "pos_embed_weights",
    "rope_positions",
    "frame_rows",
    "frame_mask",
    "packed_rows",
)

_LAYER_NORM_EPSILON = 1e-6
_ROPE_BASE = 10000.0


def vision_graph(spec: TargetSpec, dtype: str, locate: Locate) -> onnx.ModelProto:
    """Build the vision graph.

    Inputs (``multimodal/vision_rows.py`` makes all but the patches from ``grid_thw``):
        patches: T [n, C * t * p * p], in merge-block order.
        pos_embed_rows: i32 [4, n], pos_embed_weights: f32 [4, n]: the bilinear corners of the position table.
        rope_positions: i32 [2, n]: row and column of each patch.
        frame_rows: i32 [F, L]: which packed row is patch l of frame f; frame_mask: bool [F, L]: false where a shorter
            frame has none; packed_rows: i32 [n]: the way back, into F * L.
    Outputs: ``visual_embeds`` T [N, H]; ``deepstack`` T [L_ds, N, H] (left out when there are no levels).
    """
    vision, tensors = spec.vision, spec.tensors
    b = GraphBuilder("vision", dtype, locate)
    patches = b.input("patches", b.dtype, ("patches", vision.patch_dim))
    hidden = _patch_embedding(b, patches, tensors, vision)
    attention = _FrameAttention(b, vision)
    levels: list[Value] = []
    for i in range(vision.depth):
        prefix = f"visual.blocks.{i}."
        with b.scope(f"blocks.{i}"):
            normed = _layer_norm(b, hidden, tensors, f"{prefix}norm1", "norm1")
            attended = attention.emit(normed, tensors, prefix)
            hidden = b.op("Add", hidden, attended, name="attention_residual")
            normed = _layer_norm(b, hidden, tensors, f"{prefix}norm2", "norm2")
            inner = _linear(b, normed, tensors, f"{prefix}mlp.linear_fc1", "mlp.fc1")
            inner = _activation(b, inner, vision.hidden_act)
            hidden = b.op(
                "Add", hidden, _linear(b, inner, tensors, f"{prefix}mlp.linear_fc2", "mlp.fc2"), name="output"
            )
        if i in vision.deepstack_layers:
            level = vision.deepstack_layers.index(i)
            with b.scope(f"deepstack_merger.{level}"):
                levels.append(_merger(b, hidden, tensors, f"visual.deepstack_merger_list.{level}.", vision, after=True))
    with b.scope("merger"):
        merged = _merger(b, hidden, tensors, "visual.merger.", vision, after=False)
    b.output(merged, "visual_embeds", ("tokens", vision.out_hidden_size))
    if levels:
        axis = b.constant(np.array([0], dtype=np.int64), "first_axis")
        stacked = [b.op("Unsqueeze", v, axis, name=f"level.{i}") for i, v in enumerate(levels)]
        deepstack = b.op("Concat", *stacked, name="deepstack", axis=0)
        b.output(deepstack, "deepstack", (len(levels), "tokens", vision.out_hidden_size))
    return b.build()


def _patch_embedding(b: GraphBuilder, patches: Value, tensors: Mapping[str, TensorRef], vision: VisionSpec) -> Value:
    """The Conv3d whose stride is its kernel is a matrix product; then the interpolated position embedding."""
    proj = tensors["visual.patch_embed.proj.weight"]
    flat = dataclasses.replace(proj, shape=(vision.hidden_size, vision.patch_dim))
    embedded = b.linear(patches, [flat], [tensors["visual.patch_embed.proj.bias"]], name="patch_embed")
    table = b.weight(tensors["visual.pos_embed.weight"])
    corner_rows = b.input("pos_embed_rows", TensorProto.INT32, (4, "patches"))
    weights = b.input("pos_embed_weights", TensorProto.FLOAT, (4, "patches"))
    last = b.constant(np.array([-1], dtype=np.int64), "last_axis")
    corners = b.op("Gather", table, corner_rows, name="pos_embed_corners", axis=0)
    weighted = b.op("Mul", corners, b.op("Unsqueeze", b.cast(weights, b.dtype), last), name="pos_embed_weighted")
    parts = [b.op("Gather", weighted, b.index(i), name=f"pos_embed_corner.{i}", axis=0) for i in range(4)]
    position = b.op("Add", b.op("Add", b.op("Add", parts[0], parts[1]), parts[2]), parts[3], name="pos_embed")
    return b.op("Add", embedded, position, name="embeddings")


class _FrameAttention:
    """Attention of each patch over its own frame: frames are gathered into rows of equal length and put back."""

    def __init__(self, b: GraphBuilder, vision: VisionSpec) -> None:
        self._b = b
        self._heads = vision.num_heads
        self._dim = vision.hidden_size // vision.num_heads
        frames = b.input("frame_rows", TensorProto.INT32, ("frames", "longest"))
        mask = b.input("frame_mask", TensorProto.BOOL, ("frames", "longest"))
        self._frame_rows = frames
        self._packed_rows = b.input("packed_rows", TensorProto.INT32, ("patches",))
        middle = b.constant(np.array([1, 2], dtype=np.int64), "middle_axes")
        self._mask = b.op("Unsqueeze", mask, middle, name="frame_mask_4d")
        self._never = b.cast(b.constant(np.array(-np.inf, dtype=np.float32), "minus_infinity"), b.dtype)
        self._scale = b.cast(b.constant(np.array(self._dim**-0.5, dtype=np.float32), "vision_scale"), b.dtype)
        self._cos, self._sin = self._angles()

    def _angles(self) -> tuple[Value, Value]:
        """cos and sin, f32 [n, 1, d/2]: the first half of the pairs turn by the row, the second by the column."""
        b, half = self._b, self._dim // 2
        quarter = (1.0 / _ROPE_BASE ** (np.arange(0, half, 2, dtype=np.float32) / np.float32(half))).astype(np.float32)
        inv_freq = b.constant(np.concatenate([quarter, quarter]), "vision_inv_freq")
        axis = b.constant(np.repeat(np.arange(2, dtype=np.int32), len(quarter)), "vision_pair_axis")
        positions = b.input("rope_positions", TensorProto.INT32, (2, "patches"))
        by_pair = b.op("Transpose", b.op("Gather", positions, axis, axis=0), name="pair_positions", perm=[1, 0])
        angles = b.op("Mul", b.cast(by_pair, TensorProto.FLOAT), inv_freq, name="angles")
        by_head = b.reshape(angles, (-1, 1, half), name="angles_by_head")
        return b.op("Cos", by_head), b.op("Sin", by_head)

    def emit(self, x: Value, tensors: Mapping[str, TensorRef], prefix: str) -> Value:
        """``x [n, hidden]`` -> attention output after the projection, ``[n, hidden]``."""
        b, heads, dim = self._b, self._heads, self._dim
        with b.scope("attn"):
            qkv = _linear(b, x, tensors, f"{prefix}attn.qkv", "qkv")
            q, k, v = (
                b.reshape(part, (-1, heads, dim), name=f"{name}_heads")
                for part, name in zip(b.split(qkv, [heads * dim] * 3, ("q", "k", "v")), "qkv", strict=True)
            )
            q = b.op("Mul", self._by_frame(self._turn(q, "q"), [0, 2, 1, 3], "q"), self._scale, name="q_scaled")
            k = self._by_frame(self._turn(k, "k"), [0, 2, 3, 1], "k")
            v = self._by_frame(v, [0, 2, 1, 3], "v")
            scores = b.op("Where", self._mask, b.op("MatMul", q, k), self._never, dtype=b.dtype, name="scores")
            mixed = b.op("MatMul", b.op("Softmax", scores, axis=-1), v, name="mixed")
            by_row = b.op("Transpose", mixed, name="mixed_rows", perm=[0, 2, 1, 3])
            flat = b.reshape(by_row, (-1, heads * dim), name="mixed_flat")
            packed = b.op("Gather", flat, self._packed_rows, name="packed", axis=0)
            return _linear(b, packed, tensors, f"{prefix}attn.proj", "output")

    def _turn(self, x: Value, name: str) -> Value:
        """Rotate-half in float32, as Qwen3-VL does."""
        b, half = self._b, self._dim // 2
        low, high = b.split(b.cast(x, TensorProto.FLOAT), (half, half), (f"{name}_low", f"{name}_high"))
        turned_low = b.op("Sub", b.op("Mul", low, self._cos), b.op("Mul", high, self._sin))
        turned_high = b.op("Add", b.op("Mul", high, self._cos), b.op("Mul", low, self._sin))
        return b.cast(b.op("Concat", turned_low, turned_high, name=f"{name}_turned", axis=-1), b.dtype)

    def _by_frame(self, x: Value, perm: list[int], name: str) -> Value:
        frames = self._b.op("Gather", x, self._frame_rows, name=f"{name}_frames", axis=0)
        return self._b.op("Transpose", frames, name=f"{name}_by_frame", perm=perm)


def _merger(
    b: GraphBuilder, x: Value, tensors: Mapping[str, TensorRef], prefix: str, vision: VisionSpec, *, after: bool
) -> Value:
    """Join each merge x merge block and project it; the norm stands before the joining or ``after`` it."""
    wide = vision.hidden_size * vision.spatial_merge_size**2
    if after:
        joined = _layer_norm(b, b.reshape(x, (-1, wide)), tensors, f"{prefix}norm", "norm")
    else:
        joined = b.reshape(_layer_norm(b, x, tensors, f"{prefix}norm", "norm"), (-1, wide))
    inner = _activation(b, _linear(b, joined, tensors, f"{prefix}linear_fc1", "fc1"), "gelu")
    return _linear(b, inner, tensors, f"{prefix}linear_fc2", "fc2")


def _linear(b: GraphBuilder, x: Value, tensors: Mapping[str, TensorRef], prefix: str, name: str) -> Value:
    return b.linear(x, [tensors[f"{prefix}.weight"]], [tensors[f"{prefix}.bias"]], name=name)


def _layer_norm(b: GraphBuilder, x: Value, tensors: Mapping[str, TensorRef], prefix: str, name: str) -> Value:
    scale, bias = b.weight(tensors[f"{prefix}.weight"]), b.weight(tensors[f"{prefix}.bias"])
    return b.op("LayerNormalization", x, scale, bias, name=name, axis=-1, epsilon=_LAYER_NORM_EPSILON)


def _activation(b: GraphBuilder, x: Value, kind: str) -> Value:
    """GELU (exact or tanh) or SiLU, from operators that opset 17 has."""

    def scalar(value: float, name: str) -> Value:
        return b.cast(b.constant(np.array(value, dtype=np.float32), name), b.dtype)

    def mul(left: Value, right: Value) -> Value:
        return b.op("Mul", left, right)

    if kind in {"silu", "swish"}:
        return mul(x, b.op("Sigmoid", x))
    if kind == "gelu":
        bent = b.op("Erf", b.op("Div", x, scalar(2**0.5, "sqrt_2")))
    elif kind in {"gelu_pytorch_tanh", "gelu_new"}:
        cube = mul(mul(x, mul(x, x)), scalar(0.044715, "gelu_cubic"))
        bent = b.op("Tanh", mul(b.op("Add", x, cube), scalar((2 / np.pi) ** 0.5, "gelu_slope")))
    else:
        raise UserError(f"vision_config.hidden_act: expected gelu, gelu_pytorch_tanh or silu, got {kind!r}")
    return mul(mul(x, b.op("Add", bent, scalar(1.0, "one"))), scalar(0.5, "half"))
