"""Build the graphs of an MTP head from the blocks of the target's own layers.

Shapes: n rows, H hidden of target and head, V vocab.
"""

from __future__ import annotations

import onnx

from trt_eagle3.drafts.mtp.manifest import MtpManifest
from trt_eagle3.graph.builder import GraphBuilder, ResolveLocation, Value
from trt_eagle3.graph.decoder import Attention, by_row, context_inputs, head, rows
from trt_eagle3.graph.moe import mlp
from trt_eagle3.graph.residual import Residual

__all__ = ["draft_graph", "fuse_graph"]

_STREAM = Residual()  # of the compute type, since a draft only proposes tokens
_HIDDEN_NORM = "pre_fc_norm_hidden"


def fuse_graph(manifest: MtpManifest, dtype: str, resolve: ResolveLocation) -> onnx.ModelProto:
    """Build ``aux_hidden_states [n, H]`` -> ``features [n, H]``: the hidden norm before fc."""
    b = GraphBuilder("fuse", dtype, resolve)
    width = manifest.hidden_size
    aux = b.input("aux_hidden_states", b.dtype, ("tokens", width))
    b.output(_norm(b, aux, manifest, _HIDDEN_NORM), "features", ("tokens", width))
    return b.build()


def draft_graph(
    manifest: MtpManifest, dtype: str, page_size: int, resolve: ResolveLocation
) -> onnx.ModelProto:
    """Build the draft graph. The tensors include the target's head."""
    tensors, width = manifest.tensors, manifest.hidden_size
    b = GraphBuilder("draft", dtype, resolve)
    embeds = rows(
        b, b.input("inputs_embeds", b.dtype, ("batch", "seq", width)), width, "embeds_rows"
    )
    features = rows(
        b, b.input("features", b.dtype, ("batch", "seq", width)), width, "features_rows"
    )
    context = context_inputs(b)
    embedded = _norm(b, embeds, manifest, "pre_fc_norm_embedding")
    halves = (embedded, features) if manifest.concat == "embedding_first" else (features, embedded)
    joined = b.op("Concat", *halves, name="embedding_and_hidden", axis=-1)
    hidden = b.linear(joined, [tensors["fc.weight"]], name="fc")
    normed = _norm(b, hidden, manifest, "layers.0.input_layernorm")
    with b.scope("layers.0"):
        attended = Attention(manifest.attention, page_size).emit(b, normed, tensors, context, 0)
        weight = tensors["layers.0.post_attention_layernorm.weight"]
        names = ("post_attention_layernorm", "attention_residual")
        normed, hidden = _STREAM.add_norm(b, attended, hidden, weight, manifest.norm, names)
        delta = mlp(b, normed, tensors, "layers.0.mlp.", manifest.layer.mlp)
    names = ("norm", "layers.0.output")
    weight = tensors["norm.weight"]
    normed, hidden = _STREAM.add_norm(b, delta, hidden, weight, manifest.norm, names)
    logits = head(b, normed, context, tensors["lm_head.weight"])
    b.output(logits, "logits", ("batch", "rows", manifest.draft_vocab_size))
    next_hidden = hidden if manifest.feedback == "pre_norm" else normed
    fed_back = by_row(b, _norm(b, next_hidden, manifest, _HIDDEN_NORM), context, width, "fed_back")
    b.output(fed_back, "features_out", ("batch", "seq", width))
    return b.build()


def _norm(b: GraphBuilder, x: Value, manifest: MtpManifest, name: str) -> Value:
    return _STREAM.norm(b, x, manifest.tensors[f"{name}.weight"], manifest.norm, name)
