"""Build the vision graph: SigLIP and the aligner over packed images of one size.

Shapes: n patches of all images, of which each is a visual token; F images; W width of the tower.
Equations: transformers ``modeling_siglip.py`` (SiglipVisionModel) and ``modeling_deepseek_vl.py``
(DeepseekVLAligner).
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.families.deepseek_vl.tower import siglip_of
from trt_eagle3.graph.builder import GraphBuilder, ResolveLocation, Value
from trt_eagle3.graph.vision import (
    FrameAttention,
    Tensors,
    activation,
    layer_norm,
    linear,
    patch_embedding,
)
from trt_eagle3.spec import VisionSpec

__all__ = ["SiglipTower", "vision_graph"]


def vision_graph(spec: TargetCheckpoint, dtype: str, resolve: ResolveLocation) -> onnx.ModelProto:
    """Build the vision graph.

    Inputs (``vision_rows.py`` computes all but the patches from ``grid_thw``):
        patches: T [n, 3 * p * p], image by image, row by row.
        rope_positions: i32 [2, n], zero: no rotation.
        frame_starts: i32 [F + 1]: image f has patches frame_starts[f] to frame_starts[f + 1] - 1.
    Output: ``visual_embeds`` T [n, H].
    """
    vision = spec.require_vision()
    b = GraphBuilder("vision", dtype, resolve)
    tower = SiglipTower(b, spec.tensors, vision)
    features = tower.run(b.input("patches", b.dtype, ("patches", vision.patch_dim)))
    with b.scope("aligner"):
        inner = linear(b, features, spec.tensors, "visual.aligner.linear1", "linear1")
        inner = activation(b, inner, "gelu")
        embeds = linear(b, inner, spec.tensors, "visual.aligner.linear2", "linear2")
    b.output(embeds, "visual_embeds", ("patches", vision.out_hidden_size))
    return b.build()


class SiglipTower:
    """SigLIP's vision model without its pooling head."""

    def __init__(self, b: GraphBuilder, tensors: Tensors, vision: VisionSpec) -> None:
        """Declare the inputs other than the patches."""
        self._b, self._tensors, self._vision = b, tensors, vision
        self._own = siglip_of(vision)
        head_dim = vision.hidden_size // vision.num_heads
        self._attention = FrameAttention(
            vision.num_heads,
            head_dim,
            b.input("rope_positions", TensorProto.INT32, (2, "patches")),
            b.constant(np.zeros(head_dim // 2, dtype=np.float32), "vision_inv_freq"),
            b.constant(np.zeros(head_dim // 2, dtype=np.int32), "vision_pair_axis"),
        )
        self._starts = b.input("frame_starts", TensorProto.INT32, ("frame_bounds",))

    def run(self, patches: Value) -> Value:
        """Return the features [n, W] of ``patches [n, 3 * p * p]``."""
        hidden = self._embeddings(patches)
        for i in range(self._vision.depth):
            with self._b.scope(f"blocks.{i}"):
                hidden = self._block(i, hidden)
        return self._norm(hidden, "visual.post_layernorm", "last_norm")

    def _embeddings(self, patches: Value) -> Value:
        b, width = self._b, self._vision.hidden_size
        prefix = "visual.embeddings."
        proj = f"{prefix}patch_embedding"
        rows = patch_embedding(b, patches, self._tensors, proj, "patches_embedded")
        by_image = b.reshape(rows, (-1, self._own.num_patches, width))
        table = b.weight(self._tensors[f"{prefix}position_embedding.weight"])
        placed = b.op("Add", by_image, table, name="placed")
        return b.reshape(placed, (-1, width), name="embeddings")

    def _block(self, i: int, hidden: Value) -> Value:
        b, tensors, prefix = self._b, self._tensors, f"visual.encoder.layers.{i}."
        normed = self._norm(hidden, f"{prefix}layer_norm1", "norm1")
        with b.scope("attn"):
            names = [f"{prefix}self_attn.{p}_proj" for p in "qkv"]
            weights, biases = ([tensors[f"{n}.{part}"] for n in names] for part in _PARTS)
            qkv = b.linear(normed, weights, biases, name="qkv_rows")
            attended = self._attention.emit(b, qkv, self._starts)
            attended = linear(b, attended, tensors, f"{prefix}self_attn.out_proj", "output")
        hidden = b.op("Add", attended, hidden, name="attention_residual")
        normed = self._norm(hidden, f"{prefix}layer_norm2", "norm2")
        inner = linear(b, normed, tensors, f"{prefix}mlp.fc1", "mlp.fc1")
        inner = activation(b, inner, self._vision.hidden_act)
        inner = linear(b, inner, tensors, f"{prefix}mlp.fc2", "mlp.fc2")
        return b.op("Add", inner, hidden, name="output")

    def _norm(self, x: Value, prefix: str, name: str) -> Value:
        return layer_norm(self._b, x, self._tensors, prefix, name, self._own.epsilon)


_PARTS = ("weight", "bias")
