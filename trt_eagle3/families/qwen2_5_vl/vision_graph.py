"""Build the vision graph: Qwen2.5-VL's tower over packed patches of any number of frames.

Rows are in window order from the first block to the last. So a window is a contiguous range of
rows, and so is a frame of windows.

Shapes: n patches of all frames, N = n / merge**2 visual tokens, F frames, W windows.
Equations: transformers ``modeling_qwen2_5_vl.py`` (Qwen2_5_VisionTransformerPretrainedModel).
"""

from __future__ import annotations

import onnx
from onnx import TensorProto

from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.families.qwen2_5_vl.tower import windows_of
from trt_eagle3.graph.builder import GraphBuilder, ResolveLocation, Value
from trt_eagle3.graph.decoder import swiglu
from trt_eagle3.graph.vision import (
    FrameAttention,
    activation,
    axial_attention,
    linear,
    patch_embedding,
    rms_norm,
)
from trt_eagle3.spec import VisionSpec

__all__ = ["vision_graph"]

_EPSILON = 1e-6


def vision_graph(spec: TargetCheckpoint, dtype: str, resolve: ResolveLocation) -> onnx.ModelProto:
    """Build the vision graph.

    Inputs (``vision_rows.py`` computes all but the patches from ``grid_thw``):
        patches: T [n, C * t * p * p], in merge-block order.
        window_rows: i32 [n]: the patch at each row.
        token_rows: i32 [N]: the row, in merged blocks, of each visual token.
        rope_positions: i32 [2, n]: row and column in its frame of the patch at each row.
        frame_starts: i32 [F + 1], window_starts: i32 [W + 1]: frame or window i has rows starts[i]
            to starts[i + 1] - 1, or none.
    Output: ``visual_embeds`` T [N, H].
    """
    vision = spec.require_vision()
    b = GraphBuilder("vision", dtype, resolve)
    tower = _Tower(b, spec, vision)
    hidden = tower.embeddings(b.input("patches", b.dtype, ("patches", vision.patch_dim)))
    for i in range(vision.depth):
        with b.scope(f"blocks.{i}"):
            hidden = tower.block(i, hidden)
    with b.scope("merger"):
        merged = tower.merger(hidden)
    rows = b.input("token_rows", TensorProto.INT32, ("tokens",))
    embeds = b.op("Gather", merged, rows, name="in_order", axis=0)
    b.output(embeds, "visual_embeds", ("tokens", vision.out_hidden_size))
    return b.build()


class _Tower:
    def __init__(self, b: GraphBuilder, spec: TargetCheckpoint, vision: VisionSpec) -> None:
        self._b, self._tensors, self._vision = b, spec.tensors, vision
        self._full = windows_of(vision).full_blocks
        self._attention: FrameAttention = axial_attention(
            b, vision.num_heads, vision.hidden_size // vision.num_heads
        )
        self._frames = b.input("frame_starts", TensorProto.INT32, ("frame_bounds",))
        self._windows = b.input("window_starts", TensorProto.INT32, ("window_bounds",))

    def embeddings(self, patches: Value) -> Value:
        """Embed the patches and sort them by windows."""
        b, prefix = self._b, "visual.patch_embed.proj"
        embedded = patch_embedding(b, patches, self._tensors, prefix, "patch_embed")
        rows = b.input("window_rows", TensorProto.INT32, ("patches",))
        return b.op("Gather", embedded, rows, name="embeddings", axis=0)

    def block(self, i: int, hidden: Value) -> Value:
        """Return the residual stream after block ``i``."""
        b, tensors, prefix = self._b, self._tensors, f"visual.blocks.{i}."
        normed = rms_norm(b, hidden, tensors, f"{prefix}norm1", "norm1", _EPSILON)
        with b.scope("attn"):
            qkv = linear(b, normed, tensors, f"{prefix}attn.qkv", "qkv")
            starts = self._frames if i in self._full else self._windows
            attended = self._attention.emit(b, qkv, starts)
            attended = linear(b, attended, tensors, f"{prefix}attn.proj", "output")
        hidden = b.op("Add", hidden, attended, name="attention_residual")
        normed = rms_norm(b, hidden, tensors, f"{prefix}norm2", "norm2", _EPSILON)
        inner = swiglu(b, normed, tensors, f"{prefix}mlp.", bias=True)
        return b.op("Add", hidden, inner, name="output")

    def merger(self, hidden: Value) -> Value:
        """Join each merge x merge block and project it."""
        b, vision = self._b, self._vision
        normed = rms_norm(b, hidden, self._tensors, "visual.merger.ln_q", "norm", _EPSILON)
        joined = b.reshape(normed, (-1, vision.hidden_size * vision.spatial_merge_size**2))
        inner = linear(b, joined, self._tensors, "visual.merger.mlp.0", "fc1")
        return linear(b, activation(b, inner, "gelu"), self._tensors, "visual.merger.mlp.2", "fc2")
