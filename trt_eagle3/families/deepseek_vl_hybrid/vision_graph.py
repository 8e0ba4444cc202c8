"""Build the vision graph: SigLIP and SAM over two squares of each image, and their aligner.

Shapes: n visual tokens of all images, F images, N = n / F; S = sqrt(N); G patches along a side of
SAM's square, W its width, C channels of its neck; B squares or windows of s x s patches.
Equations: transformers ``modeling_deepseek_vl_hybrid.py`` and ``modeling_sam.py``
(SamVisionEncoder).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
from numpy.typing import NDArray

from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.families.deepseek_vl.tower import siglip_of
from trt_eagle3.families.deepseek_vl.vision_graph import SiglipTower
from trt_eagle3.families.deepseek_vl_hybrid.sam import Sam, sam_of
from trt_eagle3.graph.builder import GraphBuilder, ResolveLocation, Value
from trt_eagle3.graph.vision import Tensors, activation, layer_norm, linear, patch_embedding
from trt_eagle3.spec import VisionSpec

__all__ = ["vision_graph"]

_NECK_EPSILON = 1e-6


def vision_graph(spec: TargetCheckpoint, dtype: str, resolve: ResolveLocation) -> onnx.ModelProto:
    """Build the vision graph.

    Inputs: as DeepSeek-VL's. ``patches`` T [n, (3 + 3 * K) * p * p] also hold the pixels of SAM's
    square (``multimodal/squares.py``).
    Output: ``visual_embeds`` T [n, H].
    """
    vision, tensors = spec.require_vision(), spec.tensors
    b = GraphBuilder("vision", dtype, resolve)
    patches = b.input("patches", b.dtype, ("patches", vision.patch_dim))
    area = vision.patch_size**2
    small, detail = b.split(patches, [3 * area, vision.patch_dim - 3 * area], ["small", "detail"])
    siglip = SiglipTower(b, tensors, vision).run(small)
    with b.scope("sam"):
        sam = _SamTower(b, tensors, vision).run(detail)
    with b.scope("aligner"):
        siglip = linear(b, siglip, tensors, "visual.aligner.vision_proj", "vision_proj")
        sam = linear(b, sam, tensors, "visual.aligner.high_res_vision_proj", "sam_proj")
        joined = activation(b, b.op("Concat", sam, siglip, name="joined", axis=-1), "gelu")
        embeds = linear(b, joined, tensors, "visual.aligner.proj", "proj")
    b.output(embeds, "visual_embeds", ("patches", vision.out_hidden_size))
    return b.build()


class _SamTower:
    def __init__(self, b: GraphBuilder, tensors: Tensors, vision: VisionSpec) -> None:
        self._b, self._tensors, self._vision = b, tensors, vision
        self._sam: Sam = sam_of(vision)
        self._tokens_side = siglip_of(vision).side

    def run(self, detail: Value) -> Value:
        """Return features [n, 4 * C] of the pixels ``detail [n, 3 * K * p * p]``."""
        b, kept = self._b, None
        hidden = self._embeddings(self._patches(detail))
        for i in range(self._sam.depth):
            with b.scope(f"blocks.{i}"):
                hidden = self._block(i, hidden)
            kept = hidden if i == self._sam.kept else kept
        assert kept is not None, f"no block {self._sam.kept}"
        last = self._features(hidden, "visual.sam.neck", "neck")
        early = self._features(kept, "visual.sam_neck", "kept_neck")
        alpha = b.weight(self._tensors["visual.sam_alpha"])
        return b.op("Add", last, b.op("Mul", early, alpha, name="kept_scaled"), name="features")

    def _patches(self, detail: Value) -> Value:
        """Return the patches [F * G * G, 3 * q * q] of the larger squares."""
        b, sam, tokens = self._b, self._sam, self._tokens_side**2
        size = self._vision.patch_dim - 3 * self._vision.patch_size**2
        by_colour = b.op(
            "Transpose", b.reshape(detail, (-1, tokens, 3, size // 3)), perm=[0, 2, 1, 3]
        )
        pixels = b.reshape(by_colour, (-1, 3, tokens * size // 3))
        if unused := tokens * size // 3 - sam.image**2:
            pixels, _ = b.split(pixels, [sam.image**2, unused], ["pixels", "unused"])
        planes = b.reshape(pixels, (-1, 3, sam.side**2, sam.patch**2))
        patches = b.op("Transpose", planes, perm=[0, 2, 1, 3])
        return b.reshape(patches, (-1, 3 * sam.patch**2), name="patches")

    def _embeddings(self, patches: Value) -> Value:
        b, sam = self._b, self._sam
        proj = "visual.sam.patch_embed.projection"
        rows = patch_embedding(b, patches, self._tensors, proj, "patches_embedded")
        if not sam.positions:
            return rows
        shape = (sam.side**2, sam.width)
        table = b.weight(dataclasses.replace(self._tensors["visual.sam.pos_embed"], shape=shape))
        placed = b.op("Add", b.reshape(rows, (-1, *shape)), table, name="placed")
        return b.reshape(placed, (-1, sam.width), name="embeddings")

    def _block(self, i: int, hidden: Value) -> Value:
        """Return the residual stream [F * G * G, W] after block ``i``."""
        b, tensors, sam, prefix = self._b, self._tensors, self._sam, f"visual.sam.layers.{i}."
        window = sam.window_of(i)
        normed = layer_norm(b, hidden, tensors, f"{prefix}layer_norm1", "norm1", sam.epsilon)
        rows = self._windows(normed, window) if window else normed
        with b.scope("attn"):
            attended = self._attention(rows, f"{prefix}attn.", window or sam.side, whole=not window)
            attended = self._joined(attended, window) if window else attended
            attended = linear(b, attended, tensors, f"{prefix}attn.proj", "output")
        hidden = b.op("Add", attended, hidden, name="attention_residual")
        normed = layer_norm(b, hidden, tensors, f"{prefix}layer_norm2", "norm2", sam.epsilon)
        inner = linear(b, normed, tensors, f"{prefix}mlp.lin1", "mlp.lin1")
        inner = activation(b, inner, sam.act)
        inner = linear(b, inner, tensors, f"{prefix}mlp.lin2", "mlp.lin2")
        return b.op("Add", inner, hidden, name="output")

    def _windows(self, rows: Value, window: int) -> Value:
        """Order rows [F * G * G, W] by windows; rows beyond the square are zero."""
        b, side, width = self._b, self._sam.side, self._sam.width
        count = -(-side // window)
        grid = b.reshape(rows, (-1, side, side, width))
        if added := count * window - side:
            pads = b.constant(np.array([0] * 5 + [added] * 2 + [0], dtype=np.int64), "window_pads")
            grid = b.op("Pad", grid, pads, name="padded")
        cut = b.reshape(grid, (-1, count, window, count, window, width))
        windows = b.op("Transpose", cut, perm=[0, 1, 3, 2, 4, 5])
        return b.reshape(windows, (-1, width), name="windows")

    def _joined(self, rows: Value, window: int) -> Value:
        """Undo ``_windows``, and drop the added rows."""
        b, side, width = self._b, self._sam.side, self._sam.width
        count = -(-side // window)
        cut = b.reshape(rows, (-1, count, count, window, window, width))
        grid = b.op("Transpose", cut, perm=[0, 1, 3, 2, 4, 5])
        grid = b.reshape(grid, (-1, count * window, count * window, width))
        if added := count * window - side:
            for axis in (1, 2):
                grid, _ = b.split(grid, [side, added], ["inside", "outside"], axis=axis)
        return b.reshape(grid, (-1, width), name="joined")

    def _attention(self, rows: Value, prefix: str, side: int, *, whole: bool) -> Value:
        """Attend within squares of ``side`` patches: rows [B * s * s, W] -> the same.

        A score is q k / sqrt(D) + q Rh[row of q - row of k] + q Rw[column of q - column of k].
        So q is extended by its products with Rh and Rw, one for each row and column of its square.
        k is extended by ones at its own row and column.

        ``whole``: one head after another, so that only its scores are in memory.
        """
        b, sam = self._b, self._sam
        heads, dim, patches = sam.heads, sam.head_dim, side**2
        bias = [self._tensors[f"{prefix}qkv.bias"]] if sam.qkv_bias else []
        qkv = b.linear(rows, [self._tensors[f"{prefix}qkv.weight"]], bias, name="qkv")
        q, k, v = b.split(qkv, [sam.width] * 3, ["q", "k", "v"])
        scaled = b.op("Mul", q, self._number(dim**-0.5, "attention_scale"), name="q_scaled")
        queries, keys, values = (b.reshape(x, (-1, patches, heads, dim)) for x in (scaled, k, v))
        if sam.relative:
            by_row = self._relative(q, f"{prefix}rel_pos_h", side, [0, 1, 2, 3, 4])
            by_column = self._relative(q, f"{prefix}rel_pos_w", side, [0, 2, 1, 3, 4])
            queries = b.op("Concat", queries, by_row, by_column, name="q_extended", axis=-1)
            pads = b.constant(np.array([0] * 7 + [2 * side], dtype=np.int64), f"k_pads_{side}")
            own_place = self._table(_own_places(side, dim), f"k_places_{side}")
            keys = b.op("Add", b.op("Pad", keys, pads), own_place, name="k_extended")
        queries = b.op("Transpose", queries, perm=[0, 2, 1, 3])
        keys = b.op("Transpose", keys, perm=[0, 2, 3, 1])
        values = b.op("Transpose", values, perm=[0, 2, 1, 3])
        parts = [(queries, keys, values)]
        if whole and heads > 1:
            each = [
                b.split(x, [1] * heads, [f"{name}{h}" for h in range(heads)], axis=1)
                for x, name in ((queries, "q"), (keys, "k"), (values, "v"))
            ]
            parts = list(zip(*each, strict=True))
        mixed = [self._mixed(*part) for part in parts]
        attended = b.op("Concat", *mixed, axis=1) if len(mixed) > 1 else mixed[0]
        by_patch = b.op("Transpose", attended, perm=[0, 2, 1, 3])
        return b.reshape(by_patch, (-1, sam.width), name="attended")

    def _mixed(self, q: Value, k: Value, v: Value) -> Value:
        b = self._b
        weights = b.op("Softmax", b.op("MatMul", q, k, name="scores"), name="weights", axis=-1)
        return b.op("MatMul", weights, v, name="mixed")

    def _relative(self, q: Value, name: str, side: int, order: list[int]) -> Value:
        """Return the products [B, s * s, H, s] of q with the vectors of each distance.

        ``order``: brings the axis of the distances before the other, in [B, row, column, H, D].
        """
        b, heads, dim = self._b, self._sam.heads, self._sam.head_dim
        distance = np.arange(side)[:, None] - np.arange(side)[None] + side - 1
        index = b.constant(distance.astype(np.int32), f"distances_{side}")
        vectors = b.op("Gather", b.weight(self._tensors[name]), index, axis=0)
        vectors = b.op("Transpose", vectors, perm=[0, 2, 1])
        grid = b.op("Transpose", b.reshape(q, (-1, side, side, heads, dim)), perm=order)
        lines = b.reshape(grid, (-1, side, side * heads, dim))
        products = b.reshape(b.op("MatMul", lines, vectors), (-1, side, side, heads, side))
        products = b.op("Transpose", products, perm=order)
        return b.reshape(products, (-1, side**2, heads, side))

    def _features(self, hidden: Value, name: str, scope: str) -> Value:
        """Return the features [n, 4 * C] of rows [F * G * G, W]: a neck, then ``sam_proj``."""
        b, sam, tensors = self._b, self._sam, self._tensors
        with b.scope(scope):
            conv1 = tensors[f"{name}.conv1.weight"]
            flat = dataclasses.replace(conv1, shape=conv1.shape[:2])
            rows = b.linear(hidden, [flat], name="conv1")
            rows = layer_norm(b, rows, tensors, f"{name}.layer_norm1", "norm1", _NECK_EPSILON)
            grid = b.reshape(rows, (-1, sam.side, sam.side, sam.channels))
            planes = b.op("Transpose", grid, perm=[0, 3, 1, 2])
            planes = self._conv(planes, f"{name}.conv2.weight", stride=1)
            grid = b.op("Transpose", planes, perm=[0, 2, 3, 1])
            grid = layer_norm(b, grid, tensors, f"{name}.layer_norm2", "norm2", _NECK_EPSILON)
            planes = b.op("Transpose", grid, perm=[0, 3, 1, 2])
            large = self._stretched(planes)
            for conv in ("conv1", "conv2"):
                large = self._conv(large, f"visual.sam_proj.{conv}.weight", stride=2)
            tokens = b.op("Transpose", large, perm=[0, 2, 3, 1])
            return b.reshape(tokens, (-1, 4 * sam.channels), name="projected")

    def _conv(self, planes: Value, name: str, stride: int) -> Value:
        weight = self._b.weight(self._tensors[name])
        return self._b.op(
            "Conv", planes, weight, kernel_shape=[3, 3], pads=[1] * 4, strides=[stride] * 2
        )

    def _stretched(self, planes: Value) -> Value:
        """Resize planes [F, C, G, G] bilinearly to [F, C, 4 * S, 4 * S], by two products."""
        b, matrix = self._b, _bilinear(self._sam.side, 4 * self._tokens_side)
        down = b.op("MatMul", self._table(matrix, "stretch_rows"), planes)
        return b.op("MatMul", down, self._table(matrix.T.copy(), "stretch_columns"))

    def _table(self, values: NDArray[np.float32], name: str) -> Value:
        b = self._b
        return b.cast(b.constant(values, name), b.dtype)

    def _number(self, value: float, name: str) -> Value:
        return self._table(np.array(value, dtype=np.float32), name)


def _own_places(side: int, dim: int) -> NDArray[np.float32]:
    """Return [s * s, 1, D + 2 * s]: ones at D + the row, and at D + s + the column of a patch."""
    places = np.zeros((side**2, 1, dim + 2 * side), dtype=np.float32)
    patch = np.arange(side**2)
    places[patch, 0, dim + patch // side] = 1
    places[patch, 0, dim + side + patch % side] = 1
    return places


def _bilinear(old: int, new: int) -> NDArray[np.float32]:
    """Return the weights [new, old] of torch's bilinear ``interpolate`` along one axis."""
    centre = np.maximum((np.arange(new) + 0.5) * old / new - 0.5, 0)
    low = np.minimum(centre.astype(np.int64), old - 1)
    high = np.minimum(low + 1, old - 1)
    share = (centre - low).astype(np.float32)
    weights = np.zeros((new, old), dtype=np.float32)
    np.add.at(weights, (np.arange(new), low), 1 - share)
    np.add.at(weights, (np.arange(new), high), share)
    return weights
