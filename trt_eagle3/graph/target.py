"""The target graph: Qwen3-VL's decoder over a paged cache, with aux hidden states for the draft."""

from __future__ import annotations

import onnx

from trt_eagle3.checkpoint.target import TargetSpec
from trt_eagle3.errors import UserError
from trt_eagle3.graph.builder import GraphBuilder, ResolveLocation, Value
from trt_eagle3.graph.decoder import Attention, by_row, context_inputs, head, rows, swiglu
from trt_eagle3.graph.residual import Residual

__all__ = ["target_graph"]

_COMPUTE_TYPE = Residual()


def target_graph(
    spec: TargetSpec,
    aux_layers: tuple[int, ...],
    aux_pre_deepstack: bool,
    dtype: str,
    page_size: int,
    resolve: ResolveLocation,
    residual: Residual = _COMPUTE_TYPE,
) -> onnx.ModelProto:
    """Build the target graph; the contract of its inputs and outputs is in
    ``docs/architecture.md``.

    Args:
        aux_layers: out(k) ids, ascending, of the hidden states that ``aux_hidden_states``
            concatenates. Empty for a target that never speculates: the output is then left out.
        aux_pre_deepstack: take out(k) before the deepstack level of layer k is added.
        dtype: compute type, ``float32``, ``float16`` or ``bfloat16``.
        residual: how the residual stream is held.
    Raises:
        UserError: an aux layer that this decoder does not have.
    """
    text, tensors = spec.text, spec.tensors
    _check_aux_layers(aux_layers, text.num_layers)
    b = GraphBuilder("target", dtype, resolve)
    embeds = b.input("inputs_embeds", b.dtype, ("batch", "seq", text.hidden_size))
    deepstack = b.input(
        "deepstack_embeds", b.dtype, (spec.num_deepstack, "batch", "seq", text.hidden_size)
    )
    levels = _deepstack_levels(b, deepstack, spec)
    context = context_inputs(b)
    attention = Attention(
        num_heads=text.num_heads,
        num_kv_heads=text.num_kv_heads,
        head_dim=text.head_dim,
        rope=text.rope,
        qk_norm=True,
        bias=text.attention_bias,
        epsilon=text.rms_norm_eps,
        page_size=page_size,
        output_scale=residual.scale,
    )
    eps = text.rms_norm_eps
    aux: dict[int, Value] = {}
    hidden = residual.enter(b, rows(b, embeds, text.hidden_size, "embeds_rows"), "embeds_stream")
    normed = residual.norm(
        b, hidden, tensors["layers.0.input_layernorm.weight"], eps, "layers.0.input_layernorm"
    )
    for layer in range(text.num_layers):
        prefix = f"layers.{layer}."
        with b.scope(f"layers.{layer}"):
            attended = attention.emit(b, normed, tensors, context, layer)
            normed, hidden = residual.add_norm(
                b,
                attended,
                hidden,
                tensors[f"{prefix}post_attention_layernorm.weight"],
                eps,
                ("post_attention_layernorm", "attention_residual"),
            )
            delta = swiglu(b, normed, tensors, f"{prefix}mlp.", bias=False, scale=residual.scale)
        last = layer + 1 == text.num_layers
        next_norm = "norm" if last else f"layers.{layer + 1}.input_layernorm"
        # as in Qwen3-VL: the layer's output is rounded first, then the level is added
        if layer < len(levels):
            before = residual.add(b, hidden, delta, f"{prefix}output_pre_deepstack")
            level = residual.enter(b, levels[layer], f"deepstack_stream.{layer}")
            hidden = residual.add(b, before, level, f"{prefix}output")
            normed = residual.norm(b, hidden, tensors[f"{next_norm}.weight"], eps, next_norm)
            aux[layer] = before if aux_pre_deepstack else hidden
        else:
            names = (next_norm, f"{prefix}output")
            normed, hidden = residual.add_norm(
                b, delta, hidden, tensors[f"{next_norm}.weight"], eps, names
            )
            aux[layer] = hidden
    logits = head(b, normed, context, tensors["lm_head.weight"])
    b.output(logits, "logits", ("batch", "rows", text.vocab_size))
    if aux_layers:
        parts = [residual.leave(b, aux[k], f"aux.{k}") for k in aux_layers]
        states = b.op("Concat", *parts, name="aux_rows", axis=-1)
        width = len(aux_layers) * text.hidden_size
        b.output(
            by_row(b, states, context, width, "aux"), "aux_hidden_states", ("batch", "seq", width)
        )
    return b.build()


def _check_aux_layers(aux_layers: tuple[int, ...], num_layers: int) -> None:
    for k in aux_layers:
        if not 0 <= k < num_layers:
            raise UserError(
                f"aux_layers {list(aux_layers)}: layer {k} is never computed by a target of "
                f"{num_layers} layers (0 to {num_layers - 1}). Correct draft.overrides.aux_layers, "
                "or use the draft of this target."
            )


def _deepstack_levels(b: GraphBuilder, deepstack: Value, spec: TargetSpec) -> list[Value]:
    """The levels as ``[n, H]`` values, one per decoder layer from 0 on.

    By ``Split``: beside plugins TensorRT 8.6 cannot build a ``Gather``.
    """
    num, hidden = spec.num_deepstack, spec.text.hidden_size
    if num == 0:
        return []
    flat = b.reshape(deepstack, (num, -1, hidden), name="deepstack_rows")
    levels = b.split(flat, [1] * num, [f"deepstack_level.{i}" for i in range(num)], axis=0)
    return [b.reshape(level, (-1, hidden), name=f"deepstack.{i}") for i, level in enumerate(levels)]
