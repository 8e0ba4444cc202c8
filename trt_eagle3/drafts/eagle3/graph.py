"""Build the graphs of an EAGLE-3 draft: ``fuse`` and ``draft``.

``fuse`` computes features from the target's aux hidden states. ``draft`` is the EAGLE-3 decoder.
Equations: EAGLE-3 (arXiv 2503.01840). ``checkpoint/manifest.py`` resolves layouts and variants.
"""

from __future__ import annotations

import onnx

from trt_eagle3.checkpoint.manifest import Eagle3Manifest
from trt_eagle3.graph.builder import GraphBuilder, ResolveLocation, Value
from trt_eagle3.graph.decoder import Attention, by_row, context_inputs, head, rows, swiglu
from trt_eagle3.graph.residual import Residual
from trt_eagle3.spec import AttentionSpec, NormSpec

__all__ = ["draft_graph", "fuse_graph"]

_STREAM = Residual()  # of the compute type, since a draft only proposes tokens


def fuse_graph(manifest: Eagle3Manifest, dtype: str, resolve: ResolveLocation) -> onnx.ModelProto:
    """Build ``aux_hidden_states [n, k * Ht]`` -> ``features [n, Hd]``: norms before fc, then fc."""
    b = GraphBuilder("fuse", dtype, resolve)
    num_aux, width, tensors = (
        len(manifest.aux_layers),
        manifest.target_hidden_size,
        manifest.tensors,
    )
    aux = b.input("aux_hidden_states", b.dtype, ("tokens", num_aux * width))
    norm = NormSpec(manifest.rms_norm_eps)
    if manifest.norm_before_fc:
        aux = _STREAM.norm(b, aux, tensors["input_norm.weight"], norm, "input_norm")
    if manifest.fc_norm:
        parts = b.split(aux, [width] * num_aux, [f"aux.{i}" for i in range(num_aux)])
        normed = [
            _STREAM.norm(b, p, tensors[f"fc_norm.{i}.weight"], norm, f"fc_norm.{i}")
            for i, p in enumerate(parts)
        ]
        aux = b.op("Concat", *normed, name="aux_normed", axis=-1)
    biases = [tensors["fc.bias"]] if manifest.fc_bias else []
    b.output(
        b.linear(aux, [tensors["fc.weight"]], biases, name="fc"),
        "features",
        ("tokens", manifest.hidden_size),
    )
    return b.build()


def draft_graph(
    manifest: Eagle3Manifest, dtype: str, page_size: int, resolve: ResolveLocation
) -> onnx.ModelProto:
    """Build the draft graph. ``lm_head.weight`` is the draft's head or the target's."""
    tensors, norm, width = manifest.tensors, NormSpec(manifest.rms_norm_eps), manifest.hidden_size
    b = GraphBuilder("draft", dtype, resolve)
    embeds = rows(
        b, b.input("inputs_embeds", b.dtype, ("batch", "seq", width)), width, "embeds_rows"
    )
    features = rows(
        b, b.input("features", b.dtype, ("batch", "seq", width)), width, "features_rows"
    )
    context = context_inputs(b)
    bias = manifest.attention_bias
    geometry = AttentionSpec(
        manifest.num_heads,
        manifest.num_kv_heads,
        manifest.head_dim,
        manifest.rope,
        qk_norm=norm if manifest.qk_norm else None,
        qkv_bias=bias,
        out_bias=bias,
    )
    attention = Attention(geometry, page_size)
    normed, hidden = _first_layer_input(b, embeds, features, manifest)
    for layer in range(manifest.num_layers):
        prefix = f"layers.{layer}."
        with b.scope(f"layers.{layer}"):
            attended = attention.emit(b, normed, tensors, context, layer)
            weight = tensors[f"{prefix}post_attention_layernorm.weight"]
            names = ("post_attention_layernorm", "attention_residual")
            normed, hidden = _STREAM.add_norm(b, attended, hidden, weight, norm, names)
            delta = swiglu(b, normed, tensors, f"{prefix}mlp.", manifest.mlp_bias)
        last = layer + 1 == manifest.num_layers
        next_norm = "norm" if last else f"layers.{layer + 1}.input_layernorm"
        names = (next_norm, f"{prefix}output")
        normed, hidden = _STREAM.add_norm(
            b, delta, hidden, tensors[f"{next_norm}.weight"], norm, names
        )
    logits = head(b, normed, context, tensors["lm_head.weight"])
    b.output(logits, "logits", ("batch", "rows", manifest.draft_vocab_size))
    fed_back = hidden if manifest.feedback == "pre_norm" else normed
    b.output(
        by_row(b, fed_back, context, width, "fed_back"), "features_out", ("batch", "seq", width)
    )
    return b.build()


def _first_layer_input(
    b: GraphBuilder, embeds: Value, features: Value, manifest: Eagle3Manifest
) -> tuple[Value, Value]:
    """Return layer 0's input concat[embedding, hidden] [n, 2 Hd] and its residual [n, Hd]."""
    tensors, norm = manifest.tensors, NormSpec(manifest.rms_norm_eps)
    layernorm = tensors["layers.0.input_layernorm.weight"]
    inner = (
        _STREAM.norm(b, features, layernorm, norm, "features_layernorm")
        if manifest.first_norm == "double"
        else features
    )
    normed = _STREAM.norm(b, inner, tensors["layers.0.hidden_norm.weight"], norm, "hidden_norm")
    embedded = _STREAM.norm(b, embeds, layernorm, norm, "layers.0.input_layernorm")
    joined = b.op("Concat", embedded, normed, name="embedding_and_hidden", axis=-1)
    return joined, features if manifest.residual == "hidden" else normed
