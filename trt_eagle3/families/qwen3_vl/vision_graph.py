"""The vision graph: Qwen3-VL's tower over packed patches of any number of images and frames.

Shapes: n patches of all frames, N = n / merge**2 visual tokens, F frames, L_ds levels.
Equations: transformers ``modeling_qwen3_vl.py`` (Qwen3VLVisionModel).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.errors import UserError
from trt_eagle3.graph.builder import GraphBuilder, ResolveLocation, Value
from trt_eagle3.spec import VisionSpec

__all__ = ["VISION_INPUTS", "vision_graph"]

VISION_INPUTS = (
    "patches",
    "pos_embed_rows",
    "pos_embed_weights",
    "rope_positions",
    "frame_starts",
)

_LAYER_NORM_EPSILON = 1e-6
_ROPE_BASE = 10000.0


def vision_graph(spec: TargetCheckpoint, dtype: str, resolve: ResolveLocation) -> onnx.ModelProto:
    """Build the vision graph.

    Inputs (``vision_rows.py`` makes all but the patches from ``grid_thw``):
        patches: T [n, C * t * p * p], in merge-block order.
        pos_embed_rows: i32 [4, n], pos_embed_weights: f32 [4, n]: the bilinear corners of the
        position table.
        rope_positions: i32 [2, n]: row and column of each patch.
        frame_starts: i32 [F + 1]: patches frame_starts[f] to frame_starts[f + 1] - 1 are those of
            frame f, which may have none.
    Outputs: ``visual_embeds`` T [N, H]; ``deepstack`` T [L_ds, N, H] (left out when there are no
    levels).
    """
    assert spec.vision is not None, "a target without a tower"
    vision, tensors = spec.vision, spec.tensors
    b = GraphBuilder("vision", dtype, resolve)
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
                "Add",
                hidden,
                _linear(b, inner, tensors, f"{prefix}mlp.linear_fc2", "mlp.fc2"),
                name="output",
            )
        if i in vision.level_blocks:
            level = vision.level_blocks.index(i)
            with b.scope(f"deepstack_merger.{level}"):
                levels.append(
                    _merger(
                        b,
                        hidden,
                        tensors,
                        f"visual.deepstack_merger_list.{level}.",
                        vision,
                        after=True,
                    )
                )
    with b.scope("merger"):
        merged = _merger(b, hidden, tensors, "visual.merger.", vision, after=False)
    b.output(merged, "visual_embeds", ("tokens", vision.out_hidden_size))
    if levels:
        axis = b.constant(np.array([0], dtype=np.int64), "first_axis")
        stacked = [b.op("Unsqueeze", v, axis, name=f"level.{i}") for i, v in enumerate(levels)]
        visual_levels = b.op("Concat", *stacked, name="deepstack", axis=0)
        b.output(visual_levels, "deepstack", (len(levels), "tokens", vision.out_hidden_size))
    return b.build()


def _patch_embedding(
    b: GraphBuilder, patches: Value, tensors: Mapping[str, TensorRef], vision: VisionSpec
) -> Value:
    """The Conv3d whose stride is its kernel is a matrix product; then the interpolated position
    embedding.
    """
    proj = tensors["visual.patch_embed.proj.weight"]
    flat = dataclasses.replace(proj, shape=(vision.hidden_size, vision.patch_dim))
    embedded = b.linear(
        patches, [flat], [tensors["visual.patch_embed.proj.bias"]], name="patch_embed"
    )
    table = b.weight(tensors["visual.pos_embed.weight"])
    corner_rows = b.input("pos_embed_rows", TensorProto.INT32, (4, "patches"))
    weights = b.input("pos_embed_weights", TensorProto.FLOAT, (4, "patches"))
    last = b.constant(np.array([-1], dtype=np.int64), "last_axis")
    corners = b.op("Gather", table, corner_rows, name="pos_embed_corners", axis=0)
    weighted = b.op(
        "Mul", corners, b.op("Unsqueeze", b.cast(weights, b.dtype), last), name="pos_embed_weighted"
    )
    parts = [
        b.op("Gather", weighted, b.index(i), name=f"pos_embed_corner.{i}", axis=0) for i in range(4)
    ]
    position = b.op(
        "Add", b.op("Add", b.op("Add", parts[0], parts[1]), parts[2]), parts[3], name="pos_embed"
    )
    return b.op("Add", embedded, position, name="embeddings")


class _FrameAttention:
    """Attention of each patch over its own frame, q and k turned by the patch's row and column."""

    def __init__(self, b: GraphBuilder, vision: VisionSpec) -> None:
        self._b = b
        self._heads = vision.num_heads
        self._head_dim = vision.hidden_size // vision.num_heads
        inv_freq, pair_axis = _rotation(self._head_dim)
        self._placing = (
            b.input("rope_positions", TensorProto.INT32, (2, "patches")),
            b.constant(inv_freq, "vision_inv_freq"),
            b.constant(pair_axis, "vision_pair_axis"),
            b.input("frame_starts", TensorProto.INT32, ("frame_bounds",)),
        )

    def emit(self, x: Value, tensors: Mapping[str, TensorRef], prefix: str) -> Value:
        """``x [n, hidden]`` -> attention output after the projection, ``[n, hidden]``."""
        b = self._b
        with b.scope("attn"):
            qkv = _linear(b, x, tensors, f"{prefix}attn.qkv", "qkv")
            scale = float(np.float32(self._head_dim**-0.5))
            attended = b.own_op(
                "VisionAttention",
                qkv,
                *self._placing,
                names=("attended",),
                num_heads=self._heads,
                scale=scale,
            )[0]
            return _linear(b, attended, tensors, f"{prefix}attn.proj", "output")


def _rotation(head_dim: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """f32 [D/2] frequencies and i32 [D/2] axes: the first half of the pairs turn by row, the
    second by column.
    """
    half = head_dim // 2
    quarter = (
        1.0 / _ROPE_BASE ** (np.arange(0, half, 2, dtype=np.float32) / np.float32(half))
    ).astype(np.float32)
    return np.concatenate([quarter, quarter]), np.repeat(np.arange(2, dtype=np.int32), len(quarter))


def _merger(
    b: GraphBuilder,
    x: Value,
    tensors: Mapping[str, TensorRef],
    prefix: str,
    vision: VisionSpec,
    *,
    after: bool,
) -> Value:
    """Join each merge x merge block and project it; the norm stands before the joining or
    ``after`` it.
    """
    wide = vision.hidden_size * vision.spatial_merge_size**2
    if after:
        joined = _layer_norm(b, b.reshape(x, (-1, wide)), tensors, f"{prefix}norm", "norm")
    else:
        joined = b.reshape(_layer_norm(b, x, tensors, f"{prefix}norm", "norm"), (-1, wide))
    inner = _activation(b, _linear(b, joined, tensors, f"{prefix}linear_fc1", "fc1"), "gelu")
    return _linear(b, inner, tensors, f"{prefix}linear_fc2", "fc2")


def _linear(
    b: GraphBuilder, x: Value, tensors: Mapping[str, TensorRef], prefix: str, name: str
) -> Value:
    return b.linear(x, [tensors[f"{prefix}.weight"]], [tensors[f"{prefix}.bias"]], name=name)


def _layer_norm(
    b: GraphBuilder, x: Value, tensors: Mapping[str, TensorRef], prefix: str, name: str
) -> Value:
    scale, bias = b.weight(tensors[f"{prefix}.weight"]), b.weight(tensors[f"{prefix}.bias"])
    return b.op(
        "LayerNormalization", x, scale, bias, name=name, axis=-1, epsilon=_LAYER_NORM_EPSILON
    )


def _activation(b: GraphBuilder, x: Value, kind: str) -> Value:
    """GELU (exact or tanh) or SiLU."""
    if kind in {"silu", "swish"}:
        return b.op("Mul", x, b.op("Sigmoid", x))
    approximate = {"gelu": "none", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh"}.get(kind)
    if approximate is None:
        raise UserError(
            f"vision_config.hidden_act: expected gelu, gelu_pytorch_tanh or silu, got {kind!r}"
        )
    return b.op("Gelu", x, approximate=approximate)
