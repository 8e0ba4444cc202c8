"""Build the graphs ``context`` and ``block`` of a block draft.

``context`` writes keys and values of committed rows, from the target's hidden states. ``block``
runs the anchor and the mask rows over them. Both have the same states.

Rope positions of both are sequence indices.

Shapes: B sequences, S rows of each, n = B * S, R rows of the head, k aux layers, Ht target hidden,
Hd draft hidden, Vd draft vocab, taps of a convolution, g channels of one of its G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
from onnx import TensorProto

from trt_eagle3.drafts.block.manifest import BlockManifest
from trt_eagle3.graph.builder import GraphBuilder, ResolveLocation, Value
from trt_eagle3.graph.decoder import (
    Attention,
    Context,
    by_picked,
    by_row,
    context_inputs,
    head,
    pick,
    rows,
    swiglu,
)
from trt_eagle3.graph.residual import Residual
from trt_eagle3.spec import AttentionSpec, NormSpec

__all__ = ["block_graph", "context_graph"]


def context_graph(
    manifest: BlockManifest, dtype: str, page_size: int, resolve: ResolveLocation
) -> onnx.ModelProto:
    """Build ``aux_hidden_states [B, S, k * Ht]`` -> keys and values of the rows.

    The attention of a layer writes them. Its output is not used, so its queries are the keys.
    """
    b = GraphBuilder("context", dtype, resolve)
    width = len(manifest.aux_layers) * manifest.target_hidden_size
    aux = b.input("aux_hidden_states", b.dtype, ("batch", "seq", width))
    context = context_inputs(b, has_head=False)
    stream = _stream(dtype)
    # ``fc`` overflows float16: its rows are computed at the scale of a wide stream
    fused = b.linear(
        rows(b, aux, width, "aux_rows"),
        [manifest.tensors["fc.weight"]],
        name="fc",
        scales=[stream.scale],
    )
    norm = NormSpec(manifest.rms_norm_eps)
    features = stream.norm(b, fused, manifest.tensors["hidden_norm.weight"], norm, "hidden_norm")
    attention = Attention(_written(_geometry(manifest)), page_size)
    tensors = dict(manifest.tensors)
    for layer in range(manifest.num_layers):
        prefix = f"layers.{layer}.self_attn."
        for part in ("weight", "bias"):
            if f"{prefix}k_proj.{part}" in tensors:
                tensors[f"{prefix}q_proj.{part}"] = tensors[f"{prefix}k_proj.{part}"]
        tensors[f"{prefix}q_norm.weight"] = tensors[f"{prefix}k_norm.weight"]
        with b.scope(f"layers.{layer}"):
            attention.attend(b, features, tensors, context, layer)
    return b.build()


def block_graph(
    manifest: BlockManifest, dtype: str, page_size: int, resolve: ResolveLocation
) -> onnx.ModelProto:
    """Build the graph of a block's rows. ``lm_head.weight`` is the draft's head or the target's.

    ``hidden`` [B, R, Hd], rows after the final norm, is an output if a sequential head reads it.
    ``causal_mask`` bool [B, S, S] is an input beside ``tree_mask`` if only some layers are causal.
    """
    b = GraphBuilder("block", dtype, resolve)
    tensors, norm, width = manifest.tensors, NormSpec(manifest.rms_norm_eps), manifest.hidden_size
    embeds = b.input("inputs_embeds", b.dtype, ("batch", "seq", width))
    context = context_inputs(b)
    masked = context
    if manifest.mixes_masks:
        mask = b.input("causal_mask", TensorProto.BOOL, ("batch", "seq", "tail"))
        masked = replace(context, tree_mask=mask)
    stream = _stream(dtype)
    hidden = stream.enter(
        b, _scaled(b, rows(b, embeds, width, "embeds_rows"), manifest.embedding_scale), "embeds_in"
    )
    geometry = _geometry(manifest)
    normed = stream.norm(
        b, hidden, tensors["layers.0.input_layernorm.weight"], norm, "layers.0.input_layernorm"
    )
    for i, layer in enumerate(manifest.layers):
        prefix = f"layers.{i}."
        attention = Attention(
            geometry,
            page_size,
            stream.scale,
            window=layer.window,
            by_anchor=manifest.window_rule == "anchor",
        )
        with b.scope(f"layers.{i}"):
            own = masked if layer.causal else context
            x, after = _convolved(b, normed, context, manifest, f"{prefix}attention_conv")
            attended = after(attention.emit(b, x, tensors, own, i))
            weight = tensors[f"{prefix}post_attention_layernorm.weight"]
            names = ("post_attention_layernorm", "attention_residual")
            normed, hidden = stream.add_norm(b, attended, hidden, weight, norm, names)
            x, after = _convolved(b, normed, context, manifest, f"{prefix}mlp_conv")
            delta = after(swiglu(b, x, tensors, f"{prefix}mlp.", bias=False, scale=stream.scale))
        last = i + 1 == manifest.num_layers
        next_norm = "norm" if last else f"layers.{i + 1}.input_layernorm"
        names = (next_norm, f"{prefix}output")
        normed, hidden = stream.add_norm(
            b, delta, hidden, tensors[f"{next_norm}.weight"], norm, names
        )
    logits = head(b, normed, context, tensors["lm_head.weight"])
    b.output(_capped(b, logits, manifest), "logits", ("batch", "rows", manifest.draft_vocab_size))
    if manifest.reads_hidden:
        found = by_picked(b, pick(b, normed, context), context, width, "hidden_by_row")
        b.output(found, "hidden", ("batch", "rows", width))
    return b.build()


def _stream(dtype: str) -> Residual:
    """Return the residual stream; float16 could not hold the values of ``fc`` and of the stream."""
    return Residual(wide=dtype == "float16")


def _geometry(manifest: BlockManifest) -> AttentionSpec:
    bias = manifest.attention_bias
    return AttentionSpec(
        manifest.num_heads,
        manifest.num_kv_heads,
        manifest.head_dim,
        manifest.rope,
        qk_norm=NormSpec(manifest.rms_norm_eps),
        qkv_bias=bias,
        out_bias=bias,
    )


def _written(spec: AttentionSpec) -> AttentionSpec:
    """Return the geometry of context rows: as many queries as keys."""
    return replace(spec, num_heads=spec.num_kv_heads)


def _scaled(b: GraphBuilder, x: Value, factor: float) -> Value:
    if factor == 1.0:
        return x
    value = b.constant(np.array(factor, dtype=np.float32), f"factor_{factor}")
    return b.op("Mul", x, b.cast(value, x.dtype, f"factor_{factor}_typed"), name="scaled")


def _capped(b: GraphBuilder, logits: Value, manifest: BlockManifest) -> Value:
    """Apply multiplier and soft cap to float32 ``logits``: ``cap * tanh(logits / cap)``."""
    logits = _scaled(b, logits, manifest.logit_multiplier)
    cap = manifest.logit_softcap
    if not cap:
        return logits
    return _scaled(b, b.op("Tanh", _scaled(b, logits, 1 / cap), name="capped"), cap)


def _convolved(
    b: GraphBuilder, x: Value, context: Context, manifest: BlockManifest, prefix: str
) -> tuple[Value, Callable[[Value], Value]]:
    """Convolve a sublayer's input ``x [n, Hd]`` (side 0); returns it, and the same for its output.

    The output's convolution (side 1) takes its dynamic part from ``x`` too:

        y'[t] = sum over taps of (base[side, tap] + D[side, tap, group]) * y[t - tap]

    with D = kernel_projection(x), and 0 before the first row of the block. Source: DFlash2's
    ``attention_conv`` and ``mlp_conv`` (z-lab).
    """
    taps, width = manifest.conv_kernel, manifest.hidden_size
    if not taps:
        return x, lambda y: y
    group, kernels = manifest.conv_group, 2 * taps
    name = prefix.rsplit(".", 1)[-1]
    dynamic = b.linear(x, [manifest.tensors[f"{prefix}.kernel_projection.weight"]], name=name)
    by_group = b.reshape(dynamic, (-1, kernels, width // group, 1), name=f"{name}_dynamic")
    base = b.weight(manifest.tensors[f"{prefix}.base_kernel"])  # [2, taps, Hd]
    grouped = b.reshape(base, (1, kernels, width // group, group), name=f"{name}_base")
    both = b.op("Add", by_group, grouped, name=f"{name}_kernels")  # a group's channels share D
    flat = b.reshape(both, (-1, kernels * width), name=f"{name}_flat")
    parts = b.split(flat, [width] * kernels, [f"{name}_{i}" for i in range(kernels)])

    def side(y: Value, which: int) -> Value:
        typed = b.cast(y, b.dtype, f"{name}_typed")
        block = by_row(b, typed, context, width, f"{name}_by_row")
        total: Value | None = None
        for tap in range(taps):
            earlier = rows(b, _shifted(b, block, tap, f"{name}_tap"), width, f"{name}_rows")
            term = b.op("Mul", parts[which * taps + tap], earlier, name=f"{name}_term")
            total = term if total is None else b.op("Add", total, term, name=f"{name}_sum")
        assert total is not None
        return total

    return side(x, 0), lambda y: side(y, 1)


def _shifted(b: GraphBuilder, x: Value, tap: int, name: str) -> Value:
    """Return ``x [B, S, Hd]`` ``tap`` rows later, with zeros before the first row."""
    if not tap:
        return x
    pads = b.constant(np.array([0, tap, 0, 0, -tap, 0], dtype=np.int64), f"later_by_{tap}")
    return b.op("Pad", x, pads, name=name)
