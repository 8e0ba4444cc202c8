"""Build the vision graph: Qwen3-VL's tower over packed patches of any number of frames.

Shapes: n patches of all frames, N = n / merge**2 visual tokens, F frames, L_ds levels.
Equations: transformers ``modeling_qwen3_vl.py`` (Qwen3VLVisionModel).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto

from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.graph.builder import GraphBuilder, ResolveLocation, Value
from trt_eagle3.graph.vision import (
    activation,
    axial_attention,
    layer_norm,
    linear,
    patch_embedding,
)
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


def vision_graph(spec: TargetCheckpoint, dtype: str, resolve: ResolveLocation) -> onnx.ModelProto:
    """Build the vision graph.

    Inputs (``vision_rows.py`` computes all but the patches from ``grid_thw``):
        patches: T [n, C * t * p * p], in merge-block order.
        pos_embed_rows: i32 [4, n], pos_embed_weights: f32 [4, n]: the bilinear corners of the
        position table.
        rope_positions: i32 [2, n]: row and column of each patch.
        frame_starts: i32 [F + 1]: frame f has patches frame_starts[f] to frame_starts[f + 1] - 1,
            or none.
    Outputs: ``visual_embeds`` T [N, H]; ``deepstack`` T [L_ds, N, H], omitted if there are no
    levels.
    """
    assert spec.vision is not None, "a target without a tower"
    vision, tensors = spec.vision, spec.tensors
    b = GraphBuilder("vision", dtype, resolve)
    patches = b.input("patches", b.dtype, ("patches", vision.patch_dim))
    hidden = _embeddings(b, patches, tensors)
    attention = axial_attention(b, vision.num_heads, vision.hidden_size // vision.num_heads)
    starts = b.input("frame_starts", TensorProto.INT32, ("frame_bounds",))
    levels: list[Value] = []
    for i in range(vision.depth):
        prefix = f"visual.blocks.{i}."
        with b.scope(f"blocks.{i}"):
            normed = layer_norm(b, hidden, tensors, f"{prefix}norm1", "norm1", _LAYER_NORM_EPSILON)
            with b.scope("attn"):
                qkv = linear(b, normed, tensors, f"{prefix}attn.qkv", "qkv")
                attended = attention.emit(b, qkv, starts)
                attended = linear(b, attended, tensors, f"{prefix}attn.proj", "output")
            hidden = b.op("Add", hidden, attended, name="attention_residual")
            normed = layer_norm(b, hidden, tensors, f"{prefix}norm2", "norm2", _LAYER_NORM_EPSILON)
            inner = linear(b, normed, tensors, f"{prefix}mlp.linear_fc1", "mlp.fc1")
            inner = activation(b, inner, vision.hidden_act)
            hidden = b.op(
                "Add",
                hidden,
                linear(b, inner, tensors, f"{prefix}mlp.linear_fc2", "mlp.fc2"),
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


def _embeddings(b: GraphBuilder, patches: Value, tensors: Mapping[str, TensorRef]) -> Value:
    """Embed the patches and add the interpolated position embedding."""
    embedded = patch_embedding(b, patches, tensors, "visual.patch_embed.proj", "patch_embed")
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


def _merger(
    b: GraphBuilder,
    x: Value,
    tensors: Mapping[str, TensorRef],
    prefix: str,
    vision: VisionSpec,
    *,
    after: bool,
) -> Value:
    """Join each merge x merge block and project it; the norm is before or ``after`` the joining."""
    wide = vision.hidden_size * vision.spatial_merge_size**2
    if after:
        joined = layer_norm(
            b, b.reshape(x, (-1, wide)), tensors, f"{prefix}norm", "norm", _LAYER_NORM_EPSILON
        )
    else:
        joined = b.reshape(
            layer_norm(b, x, tensors, f"{prefix}norm", "norm", _LAYER_NORM_EPSILON), (-1, wide)
        )
    inner = activation(b, linear(b, joined, tensors, f"{prefix}linear_fc1", "fc1"), "gelu")
    return linear(b, inner, tensors, f"{prefix}linear_fc2", "fc2")
