"""Faults of the target graph, its KV cache, and of the tokens emitted from its logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

from tests.parity.fault import (
    MORE_TOKENS,
    STEP,
    Fault,
    decoding,
    eps_of,
    given,
    gives,
    moved,
    reweigh,
    rope_of,
    row_spoilt,
    swapped,
)
from tests.parity.planting import MANIFEST, Seam, Tensors
from trt_eagle3.decode.memory.kv_cache import KVCache


def _rounded_norm(model: onnx.ModelProto) -> None:
    """Round one layer's norm to bfloat16 and back."""
    graph, name = model.graph, "layers.2.post_attention_layernorm"
    at = next(i for i, node in enumerate(graph.node) if name in node.output)
    node = graph.node[at]
    node.output[list(node.output).index(name)] = f"{name}.exact"
    graph.node.insert(
        at + 1,
        helper.make_node("Cast", [f"{name}.exact"], [f"{name}.bf16"], to=TensorProto.BFLOAT16),
    )
    graph.node.insert(
        at + 2, helper.make_node("Cast", [f"{name}.bf16"], [name], to=TensorProto.FLOAT)
    )


def _other_scale(model: onnx.ModelProto) -> None:
    nodes = [node for node in model.graph.node if node.op_type == "TreeAttention"]
    scale = next(a for a in nodes[1].attribute if a.name == "scale")
    scale.f *= 0.9


def _stale_row(seam: Seam, inputs: Tensors) -> Tensors:
    """The row before the new ones holds another row's keys: as if its page had not been written."""
    if decoding(inputs):
        row = int(inputs["past_lengths"][0]) - 1
        for state in seam.states:
            if state.kind == "paged":
                cache, size = seam.bound[state.name], 16
                slots = [
                    int(inputs["page_table"][0, r // size]) * size + r % size
                    for r in (row, row - 1)
                ]
                cache[slots[0]] = cache[slots[1]]
    return inputs


def _other_row(_: Seam, inputs: Mapping[str, Tensor], outputs: Tensors) -> Tensors:
    if inputs["logit_rows"].shape[1] == 1 and decoding(dict(inputs)):
        outputs["logits"] = outputs["logits"].roll(1, dims=-1)
    return outputs


TARGET: Mapping[str, Fault] = {
    "transposed weight": Fault(
        "an attention output projection is transposed",
        STEP,
        "layers.3.self_attn.output",
        reweigh("layers.3.self_attn.o_proj.weight", lambda w: w.T),
        also=("target.layers", "tokens.plain"),
    ),
    "rope sections": Fault(
        "rope sections [26, 3, 3] in place of [12, 10, 10]",
        STEP,
        "layers.0.self_attn.q",
        lambda p: p.rebuild("target", rope_of(sections=(26, 3, 3))),
    ),
    "chunked rope": Fault(
        "chunked rope sections in place of interleaved ones",
        STEP,
        "layers.0.self_attn.q",
        lambda p: p.rebuild("target", rope_of("chunked")),
    ),
    "rope base": Fault(
        "rope base 1e6 in place of 5e6",
        STEP,
        "layers.0.self_attn.q",
        lambda p: p.rebuild("target", rope_of(base=1e6)),
    ),
    "epsilon": Fault(
        "RMSNorm epsilon 1e-5 in place of 1e-6",
        STEP,
        "layers.0.input_layernorm",
        lambda p: p.rebuild("target", eps_of(1e-5)),
    ),
    "q and k norms": Fault(
        "the head norms of q and k are swapped",
        STEP,
        "layers.2.self_attn.q",
        lambda p: p.rebuild(
            "target",
            swapped("layers.2.self_attn.q_norm.weight", "layers.2.self_attn.k_norm.weight"),
        ),
    ),
    "gate and up": Fault(
        "gate and up projections are swapped",
        STEP,
        "layers.5.mlp.gate_up",
        lambda p: p.rebuild(
            "target", swapped("layers.5.mlp.gate_proj.weight", "layers.5.mlp.up_proj.weight")
        ),
    ),
    "norm skipped": Fault(
        "a norm's weight is ignored",
        STEP,
        "layers.4.post_attention_layernorm",
        reweigh("layers.4.post_attention_layernorm.weight", torch.ones_like),
    ),
    "rounded norm": Fault(
        "a norm is rounded to bfloat16",
        STEP,
        "layers.2.post_attention_layernorm",
        lambda p: p.edit("target", _rounded_norm),
    ),
    "attention scale": Fault(
        "attention scores of one layer are scaled by 0.9",
        STEP,
        "layers.1.self_attn.out",
        lambda p: p.edit("target", _other_scale),
    ),
    "deepstack layer": Fault(
        "deepstack levels are added one layer too late",
        STEP,
        "layers.0.output",
        given(
            "inside",
            "target",
            lambda _, i: moved(i, "deepstack_embeds", lambda t: t.roll(1, dims=0)),
        ),
    ),
    "stale KV row": Fault(
        "the last committed row's keys are another row's while the target decodes",
        STEP,
        "layers.0.self_attn.out",
        given("inside", "target", _stale_row),
    ),
    "aux side": Fault(
        "aux states are taken after deepstack in place of before it",
        "target.aux",
        "aux_hidden_states[out(1)]",
        lambda p: p.rebuild("target", draft=dataclasses.replace(MANIFEST, aux_pre_deepstack=False)),
    ),
    "aux layer": Fault(
        "aux layers are off by one",
        "target.aux",
        "aux_hidden_states[out(1)]",
        lambda p: p.rebuild("target", draft=dataclasses.replace(MANIFEST, aux_layers=(2, 4, 5))),
    ),
    "head": Fault(
        "the token table stands where the head should",
        "target.logits_cosine",
        "logits",
        lambda p: p.rebuild("target", swapped("lm_head.weight", "embed_tokens.weight")),
        also=("target.logits_l2", "target.top1", "target.top5"),
        max_tokens=MORE_TOKENS,
    ),
    "token of other logits": Fault(
        "the token emitted is not the best of the row's logits",
        "tokens.plain",
        "tokens",
        lambda p: p.outside.update({"target": Seam(None, gave=_other_row)}),
    ),
    "no compaction": Fault(
        "accepted rows of a tree are not moved together in the KV cache",
        "verify.logits",
        "logits",
        lambda p: p.patch.setattr(KVCache, "move", lambda *_: None),
    ),
    "one aux row": Fault(
        "one aux row of many is too large",
        "target.aux",
        "aux_hidden_states[out(1)]",
        gives("target", row_spoilt("aux_hidden_states", 1)),
    ),
}
