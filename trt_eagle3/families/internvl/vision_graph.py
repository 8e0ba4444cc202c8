"""Build the vision graph: InternViT and its projector over packed tiles of any number of images.

Shapes: n patches of all tiles, R rows (with a class token per tile), N = n / merge**2 visual
tokens, F tiles.
Equations: transformers ``modeling_internvl.py`` (InternVLVisionModel, get_image_features).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
from onnx import TensorProto

from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.families.internvl.tower import tiles_of
from trt_eagle3.graph.builder import GraphBuilder, ResolveLocation, Value
from trt_eagle3.graph.vision import (
    FrameAttention,
    activation,
    layer_norm,
    linear,
    patch_embedding,
    rms_norm,
)
from trt_eagle3.spec import VisionSpec

__all__ = ["vision_graph"]

_QK_EPSILON = 1e-6
_PROJECTOR_EPSILON = 1e-5


def vision_graph(spec: TargetCheckpoint, dtype: str, resolve: ResolveLocation) -> onnx.ModelProto:
    """Build the vision graph.

    Inputs (``vision_rows.py`` computes all but the patches from ``grid_thw``):
        patches: T [n, C * p * p], tile by tile, each in merge-block order.
        row_sources: i32 [R]: 0 for the class token, else 1 + the patch at each row.
        position_rows: i32 [R]: the row's entry in the position table.
        patch_rows: i32 [n]: the row of each patch.
        rope_positions: i32 [2, R], zero: no rotation.
        frame_starts: i32 [F + 1]: tile f has rows frame_starts[f] to frame_starts[f + 1] - 1.
    Output: ``visual_embeds`` T [N, H].
    """
    vision = spec.require_vision()
    b = GraphBuilder("vision", dtype, resolve)
    tower = _Tower(b, spec, vision)
    hidden = tower.embeddings(b.input("patches", b.dtype, ("patches", vision.patch_dim)))
    for i in range(vision.depth):
        with b.scope(f"blocks.{i}"):
            hidden = tower.block(i, hidden)
    hidden = tower.last_norm(hidden)
    rows = b.input("patch_rows", TensorProto.INT32, ("patches",))
    features = b.op("Gather", hidden, rows, name="features", axis=0)
    with b.scope("projector"):
        embeds = tower.projector(features)
    b.output(embeds, "visual_embeds", ("tokens", vision.out_hidden_size))
    return b.build()


class _Tower:
    def __init__(self, b: GraphBuilder, spec: TargetCheckpoint, vision: VisionSpec) -> None:
        self._b, self._tensors, self._vision = b, spec.tensors, vision
        self._own = tiles_of(vision)
        head_dim = vision.hidden_size // vision.num_heads
        pairs = head_dim // 2
        self._attention = FrameAttention(
            vision.num_heads,
            head_dim,
            b.input("rope_positions", TensorProto.INT32, (2, "rows")),
            b.constant(np.zeros(pairs, dtype=np.float32), "vision_inv_freq"),
            b.constant(np.zeros(pairs, dtype=np.int32), "vision_pair_axis"),
        )
        self._tiles = b.input("frame_starts", TensorProto.INT32, ("frame_bounds",))

    def embeddings(self, patches: Value) -> Value:
        """Embed the patches, insert class tokens, and add positions."""
        b, prefix = self._b, "visual.embeddings."
        proj = f"{prefix}patch_embeddings.projection"
        embedded = patch_embedding(b, patches, self._tensors, proj, "patches_embedded")
        # as matrices, since tiles are not a dimension here
        first = self._matrix(f"{prefix}cls_token", 1)
        table = self._matrix(f"{prefix}position_embeddings", self._own.num_patches + 1)
        sources = b.input("row_sources", TensorProto.INT32, ("rows",))
        places = b.input("position_rows", TensorProto.INT32, ("rows",))
        known = b.op("Concat", first, embedded, name="class_and_patches", axis=0)
        rows = b.op("Gather", known, sources, name="rows", axis=0)
        position = b.op("Gather", table, places, name="positions", axis=0)
        return b.op("Add", rows, position, name="embeddings")

    def block(self, i: int, hidden: Value) -> Value:
        """Return the residual stream after block ``i``."""
        b, tensors, prefix = self._b, self._tensors, f"visual.encoder.layer.{i}."
        normed = self._norm(hidden, f"{prefix}layernorm_before", "norm1")
        with b.scope("attn"):
            attended = self._attention.emit(b, self._qkv(normed, prefix), self._tiles)
            attended = linear(b, attended, tensors, f"{prefix}attention.projection_layer", "output")
        scaled = b.op("Mul", attended, b.weight(tensors[f"{prefix}lambda_1"]), name="attn_scaled")
        hidden = b.op("Add", scaled, hidden, name="attention_residual")
        normed = self._norm(hidden, f"{prefix}layernorm_after", "norm2")
        inner = linear(b, normed, tensors, f"{prefix}mlp.fc1", "mlp.fc1")
        inner = activation(b, inner, self._vision.hidden_act)
        inner = linear(b, inner, tensors, f"{prefix}mlp.fc2", "mlp.fc2")
        scaled = b.op("Mul", inner, b.weight(tensors[f"{prefix}lambda_2"]), name="mlp_scaled")
        return b.op("Add", scaled, hidden, name="output")

    def last_norm(self, hidden: Value) -> Value:
        """Apply the norm after the last block, if the tower has one."""
        if not self._own.last_norm:
            return hidden
        name, epsilon = "visual.layernorm", self._own.epsilon
        return layer_norm(self._b, hidden, self._tensors, name, "last_norm", epsilon)

    def projector(self, features: Value) -> Value:
        """Join the adjacent patches of each token and project them."""
        b, tensors, vision = self._b, self._tensors, self._vision
        joined = b.reshape(features, (-1, vision.hidden_size * vision.spatial_merge_size**2))
        prefix = "visual.projector."
        normed = layer_norm(b, joined, tensors, f"{prefix}layer_norm", "norm", _PROJECTOR_EPSILON)
        inner = linear(b, normed, tensors, f"{prefix}linear_1", "fc1")
        inner = activation(b, inner, self._own.projector_act)
        return linear(b, inner, tensors, f"{prefix}linear_2", "fc2")

    def _qkv(self, x: Value, prefix: str) -> Value:
        b, tensors, width = self._b, self._tensors, self._vision.hidden_size
        names = [f"{prefix}attention.{p}_proj" for p in "qkv"]
        biases = [tensors[f"{name}.bias"] for name in names] if self._own.qkv_bias else []
        qkv = b.linear(x, [tensors[f"{name}.weight"] for name in names], biases, name="qkv_rows")
        if not self._own.qk_norm:
            return qkv
        q, k, v = b.split(qkv, [width] * 3, ["q", "k", "v"])
        normed = [
            rms_norm(b, y, tensors, f"{prefix}attention.{p}_norm", f"{p}_norm", _QK_EPSILON)
            for y, p in ((q, "q"), (k, "k"))
        ]
        return b.op("Concat", *normed, v, name="qkv_normed", axis=-1)

    def _norm(self, x: Value, prefix: str, name: str) -> Value:
        norm = rms_norm if self._own.rms else layer_norm
        return norm(self._b, x, self._tensors, prefix, name, self._own.epsilon)

    def _matrix(self, name: str, rows: int) -> Value:
        shape = (rows, self._vision.hidden_size)
        return self._b.weight(dataclasses.replace(self._tensors[name], shape=shape))
