"""Parts that target and draft graphs share: inputs of a paged decoder, attention, and the MLP.

Shapes: B rows, S new tokens per row, M masked tail, P pages per row, R rows with logits, n = B * S.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto

from trt_eagle3.checkpoint.kv_scales import KVScales
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.dtype import dtype_of_onnx
from trt_eagle3.graph.builder import GraphBuilder, Value
from trt_eagle3.spec import AttentionSpec, NormSpec, StateSpec

__all__ = [
    "CONTEXT_INPUTS",
    "ENTRY_INPUTS",
    "KV_SCALES",
    "Attention",
    "Context",
    "by_picked",
    "by_row",
    "context_inputs",
    "head",
    "pick",
    "rows",
    "swiglu",
]

CONTEXT_INPUTS = (
    "position_ids",
    "past_lengths",
    "query_lengths",
    "page_table",
    "tree_mask",
    "logit_rows",
)

ENTRY_INPUTS = ("state_reads", "state_writes", "certain")
"""Inputs of states with an entry per sequence: each sequence's read and written entries, and how
many of its new rows the written entry includes.
"""

KV_SCALES = "kv_scales"
"""Stem of the names of a layer's key and value scales: ``kv_scales.3``."""


@dataclass(frozen=True)
class Context:
    """The inputs that place the new tokens: positions, cache slots, and the attention mask.

    ``logit_rows``: None in a graph without a head. ``entries``: the inputs of states with an entry
    per sequence (``ENTRY_INPUTS``), if any.
    """

    position_ids: Value
    past_lengths: Value
    query_lengths: Value
    page_table: Value
    tree_mask: Value
    logit_rows: Value | None = None
    entries: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Attention:
    """One attention layer of the geometry ``spec``.

    Attributes:
        output_scale: factor of ``o_proj`` (``graph/residual.py``).
        kv_scales: scales of an FP8 cache.
        window: slots that a row sees back and ahead, or back from the anchor if ``by_anchor``
            (``TreeAttention``); 0: all.
    """

    spec: AttentionSpec
    page_size: int
    output_scale: float = 1.0
    kv_scales: KVScales | None = None
    window: int = 0
    by_anchor: bool = False

    def emit(
        self,
        b: GraphBuilder,
        x: Value,
        tensors: Mapping[str, TensorRef],
        context: Context,
        layer: int,
    ) -> Value:
        """Compute attention with o_proj, ``x [n, width]`` -> ``[n, H]``; update cache ``layer``."""
        prefix = f"layers.{layer}.self_attn."
        out = self.attend(b, x, tensors, context, layer)
        with b.scope("self_attn"):
            biases = [tensors[f"{prefix}o_proj.bias"]] if self.spec.out_bias else []
            scales = [self.output_scale]
            return b.linear(
                out, [tensors[f"{prefix}o_proj.weight"]], biases, name="output", scales=scales
            )

    def attend(
        self,
        b: GraphBuilder,
        x: Value,
        tensors: Mapping[str, TensorRef],
        context: Context,
        layer: int,
    ) -> Value:
        """Compute attention without o_proj, ``x [n, width]`` -> ``[n, Hq * D]``; update cache
        ``layer``.
        """
        prefix, spec = f"layers.{layer}.self_attn.", self.spec
        with b.scope("self_attn"):
            biases = [tensors[f"{prefix}{p}_proj.bias"] for p in "qkv"] if spec.qkv_bias else []
            qkv = b.linear(
                x, [tensors[f"{prefix}{p}_proj.weight"] for p in "qkv"], biases, name="qkv"
            )
            qkv, gate = self._cut_gate(b, qkv)
            q, k, v = self._rope(b, qkv, tensors, prefix, context)
            states = self.states(layer, dtype_of_onnx(b.dtype).name)
            k_cache, v_cache = (b.state(state) for state in states)
            out, k_new, v_new = b.own_op(
                "TreeAttention",
                *(q, k, v, k_cache, v_cache),
                *(
                    context.past_lengths,
                    context.query_lengths,
                    context.page_table,
                    context.tree_mask,
                    *([] if self.kv_scales is None else [self._scales(b, self.kv_scales, layer)]),
                ),
                names=("out", "k_cache", "v_cache"),
                overload=self._form,
                dtypes=(b.dtype, k_cache.dtype, v_cache.dtype),
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                page_size=self.page_size,
                scale=spec.rope.attention_scaling**2 / spec.head_dim**0.5,
                **({self._form: self.window} if self.window else {}),
            )
            for state, updated in zip(states, (k_new, v_new), strict=True):
                b.update_state(state, updated)
            if gate is not None:
                out = b.op("Mul", out, b.op("Sigmoid", gate, name="gate_opened"), name="gated")
            return out

    @property
    def _form(self) -> str:
        """The overload of ``TreeAttention``."""
        assert self.kv_scales is None or not self.window, "an FP8 cache has no window"
        if self.window:
            return "anchor_window" if self.by_anchor else "window"
        return "" if self.kv_scales is None else "fp8"

    def _cut_gate(self, b: GraphBuilder, qkv: Value) -> tuple[Value, Value | None]:
        """Split off the gate channels that follow each head of q. Return q, k, v and the gate."""
        spec = self.spec
        if not spec.output_gate:
            return qkv, None
        both, kv = b.split(qkv, [spec.q_proj_width, 2 * spec.kv_width], ["q_and_gate", "kv"])
        heads = b.reshape(both, (-1, spec.num_heads, 2 * spec.head_dim), name="q_and_gate_heads")
        q, gate = b.split(heads, [spec.head_dim] * 2, ["q_heads", "gate_heads"])
        flat = (b.reshape(x, (-1, spec.q_width), name=n) for x, n in ((q, "q_raw"), (gate, "gate")))
        q, gate = flat
        return b.op("Concat", q, kv, name="qkv_ungated", axis=-1), gate

    def _scales(self, b: GraphBuilder, scales: KVScales, layer: int) -> Value:
        """Create the scales constant, float32 [2, Hkv]."""
        by_head = np.array(scales.by_head(self.spec.num_kv_heads, layer), dtype=np.float32)
        return b.constant(by_head, f"{KV_SCALES}.{layer}")

    def states(self, layer: int, dtype: str) -> tuple[StateSpec, StateSpec]:
        """Return the state of ``layer`` per token: its key and its value; FP8 ones as bytes."""
        shape = (self.spec.num_kv_heads, self.spec.head_dim)
        dtype = dtype if self.kv_scales is None else "uint8"
        return (
            StateSpec(f"k_cache.{layer}", "paged", shape, dtype),
            StateSpec(f"v_cache.{layer}", "paged", shape, dtype),
        )

    def _rope(
        self,
        b: GraphBuilder,
        qkv: Value,
        tensors: Mapping[str, TensorRef],
        prefix: str,
        context: Context,
    ) -> list[Value]:
        """Apply norms and rope.

        Yarn's factor on cos and sin is applied, squared, in the attention scale instead. The
        products are the same.
        """
        spec, norm, rope = self.spec, self.spec.qk_norm, self.spec.rope
        tables = [
            b.constant(np.array(rope.inv_freq, dtype=np.float32), "rope.inv_freq"),
            b.constant(rope.axis_of_pair.astype(np.int32), "rope.pair_axis"),
        ]
        norms = [b.weight(tensors[f"{prefix}{p}_norm.weight"]) for p in "qk"] if norm else []
        overload, attributes = self._norm_form(norm)
        return b.own_op(
            "QKNormMRope",
            *(qkv, context.position_ids, *tables, *norms),
            names=("q", "k", "v"),
            overload=overload,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            **attributes,
        )

    def _norm_form(self, norm: NormSpec | None) -> tuple[str, dict[str, Any]]:
        """Return the overload of ``QKNormMRope`` and its attributes other than head counts."""
        if norm is None:
            return "", {}
        rotary = 2 * len(self.spec.rope.inv_freq)
        if not norm.weight_offset and rotary == self.spec.head_dim:
            return "norm", {"epsilon": norm.eps}
        offset = {"weight_offset": norm.weight_offset, "rotary_dim": rotary}
        return "norm_offset", {"epsilon": norm.eps, **offset}


def context_inputs(b: GraphBuilder, *, entries: bool = False, has_head: bool = True) -> Context:
    """Declare the inputs of ``CONTEXT_INPUTS``; with ``entries``, also of ``ENTRY_INPUTS``.

    ``has_head``: the graph has logits, and so ``logit_rows``.
    """
    int32 = TensorProto.INT32
    return Context(
        position_ids=b.input("position_ids", int32, (3, "batch", "seq")),
        past_lengths=b.input("past_lengths", int32, ("batch",)),
        query_lengths=b.input("query_lengths", int32, ("batch",)),
        page_table=b.input("page_table", int32, ("batch", "pages")),
        tree_mask=b.input("tree_mask", TensorProto.BOOL, ("batch", "seq", "tail")),
        logit_rows=b.input("logit_rows", int32, ("batch", "rows")) if has_head else None,
        entries=tuple(b.input(name, int32, ("batch",)) for name in ENTRY_INPUTS if entries),
    )


def rows(b: GraphBuilder, value: Value, width: int, name: str) -> Value:
    """Flatten ``[B, S, width]`` to ``[n, width]``."""
    return b.reshape(value, (-1, width), name=name)


def swiglu(
    b: GraphBuilder,
    x: Value,
    tensors: Mapping[str, TensorRef],
    prefix: str,
    bias: bool,
    scale: float = 1.0,
) -> Value:
    """Compute ``down(silu(gate(x)) * up(x))``; ``scale`` multiplies ``up``, and so the result."""
    assert scale == 1.0 or not bias, "down_proj's bias would have to be scaled too"
    with b.scope("mlp"):
        weights = [tensors[f"{prefix}{p}_proj.weight"] for p in ("gate", "up")]
        up_biases = [tensors[f"{prefix}{p}_proj.bias"] for p in ("gate", "up")] if bias else []
        gate_up = b.linear(x, weights, up_biases, name="gate_up", scales=(1.0, scale))
        inner = b.own_op("SiluMul", gate_up, names=("inner",))[0]
        down_biases = [tensors[f"{prefix}down_proj.bias"]] if bias else []
        return b.linear(inner, [tensors[f"{prefix}down_proj.weight"]], down_biases, name="output")


def by_row(b: GraphBuilder, value: Value, context: Context, width: int, name: str) -> Value:
    """Reshape ``[n, width]`` to ``[B, S, width]``."""
    axes = b.op(
        "Shape", context.position_ids, dtype=TensorProto.INT64, name=f"{name}_axes", start=1
    )
    return _with_axes(b, value, axes, width, name)


def by_picked(b: GraphBuilder, value: Value, context: Context, width: int, name: str) -> Value:
    """Reshape ``[B * R, width]`` to ``[B, R, width]``, where R rows are in ``logit_rows``."""
    assert context.logit_rows is not None
    axes = b.op("Shape", context.logit_rows, dtype=TensorProto.INT64, name=f"{name}_axes")
    return _with_axes(b, value, axes, width, name)


def pick(b: GraphBuilder, x: Value, context: Context) -> Value:
    """Pick the ``logit_rows`` of ``x [n, width]``: ``[B * R, width]``."""
    assert context.logit_rows is not None
    return b.own_op("PickRows", x, context.logit_rows, names=("picked",))[0]


def _with_axes(b: GraphBuilder, value: Value, axes: Value, width: int, name: str) -> Value:
    last = b.constant(np.array([width], dtype=np.int64), f"width_{width}")
    shape = b.op("Concat", axes, last, name=f"{name}_shape", axis=0)
    return b.op("Reshape", value, shape, name=name)


def head(b: GraphBuilder, hidden: Value, context: Context, weight: TensorRef) -> Value:
    """Compute float32 logits ``[B, R, vocab]`` of the ``logit_rows`` of ``hidden [n, H]``."""
    picked = pick(b, hidden, context)
    flat = b.linear(picked, [weight], name="logits_flat")
    typed = by_picked(b, flat, context, weight.shape[0], "logits_typed")
    return b.cast(typed, TensorProto.FLOAT)
