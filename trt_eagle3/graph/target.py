"""The target graph: a decoder over a paged cache, with aux hidden states for the draft."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx

from trt_eagle3.checkpoint.kv_scales import KVScales
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.errors import UserError
from trt_eagle3.graph.builder import GraphBuilder, ResolveLocation, Value
from trt_eagle3.graph.decoder import Attention, Context, by_row, context_inputs, head, rows
from trt_eagle3.graph.delta_net import DeltaNet
from trt_eagle3.graph.moe import mlp
from trt_eagle3.graph.residual import Residual
from trt_eagle3.spec import (
    AttentionSpec,
    GatedDeltaSpec,
    LayerSpec,
    NormSpec,
    TargetSpec,
)

__all__ = ["target_graph"]

_COMPUTE_TYPE = Residual()


def target_graph(
    spec: TargetCheckpoint,
    aux_layers: tuple[int, ...],
    aux_pre_deepstack: bool,
    dtype: str,
    page_size: int,
    resolve: ResolveLocation,
    residual: Residual = _COMPUTE_TYPE,
    fp8_kv: bool = False,
    *,
    aux_normed: bool = False,
) -> onnx.ModelProto:
    """Build the target graph. ``docs/architecture.md`` has the contract of inputs and outputs.

    Args:
        aux_layers: out(k) ids, ascending, of the hidden states that ``aux_hidden_states``
            concatenates. Empty for a target without speculation: the output is then omitted.
        aux_pre_deepstack: take out(k) before the visual level of layer k is added.
        dtype: compute type, ``float32``, ``float16`` or ``bfloat16``.
        residual: type of the residual stream.
        aux_normed: ``aux_hidden_states`` are the last norm's rows, in place of ``aux_layers``.
        fp8_kv: store keys and values as FP8, with the scales of ``spec.kv_scales``.
    Raises:
        UserError: the decoder lacks an aux layer.
    """
    _check_aux_layers(aux_layers, spec.num_layers)
    width = spec.hidden_size
    b = GraphBuilder("target", dtype, resolve)
    embeds = b.input("inputs_embeds", b.dtype, ("batch", "seq", width))
    levels = _visual_levels(b, spec)
    context = context_inputs(b, entries=bool(spec.recurrent_layers))
    decoder = _Decoder(b, spec, context, page_size, residual, fp8_kv, levels, aux_pre_deepstack)
    normed = decoder.run(rows(b, embeds, width, "embeds_rows"))
    logits = head(b, normed, decoder.context, spec.tensors["lm_head.weight"])
    b.output(logits, "logits", ("batch", "rows", spec.vocab_size))
    if aux_layers:
        parts = [residual.leave(b, decoder.outputs[k], f"aux.{k}") for k in aux_layers]
        parts = [normed] if aux_normed else parts
        states = b.op("Concat", *parts, name="aux_rows", axis=-1)
        aux_width = len(aux_layers) * width
        by_rows = by_row(b, states, decoder.context, aux_width, "aux")
        b.output(by_rows, "aux_hidden_states", ("batch", "seq", aux_width))
    return b.build()


@dataclass
class _Decoder:
    """The layers in order; ``outputs`` keeps each out(k) for a draft."""

    b: GraphBuilder
    spec: TargetCheckpoint
    context: Context
    page_size: int
    residual: Residual
    fp8_kv: bool
    levels: list[Value]
    aux_before_level: bool
    outputs: list[Value] = field(default_factory=list)

    def run(self, embeds: Value) -> Value:
        """Compute ``embeds [n, H]`` -> the last norm's rows ``[n, H]``."""
        name = "layers.0.input_layernorm"
        hidden = self.residual.enter(self.b, embeds, "embeds_stream")
        normed = self._norm(hidden, name, self.spec.layers[0].norm)
        for k, layer in enumerate(self.spec.layers):
            hidden, delta = self._layer(k, layer, normed, hidden)
            normed, hidden = self._add(k, layer, hidden, delta)
        return normed

    def _layer(self, k: int, layer: LayerSpec, normed: Value, hidden: Value) -> tuple[Value, Value]:
        """Return the stream after attention, and the MLP's output to add to it."""
        b, tensors, prefix = self.b, self.spec.tensors, f"layers.{k}."
        with b.scope(f"layers.{k}"):
            attended = self._mixer(layer.mixer, k).emit(b, normed, tensors, self.context, k)
            normed, hidden = self.residual.add_norm(
                b,
                attended,
                hidden,
                tensors[f"{prefix}post_attention_layernorm.weight"],
                layer.norm,
                ("post_attention_layernorm", "attention_residual"),
            )
            scale = self.residual.scale
            return hidden, mlp(b, normed, tensors, f"{prefix}mlp.", layer.mlp, scale)

    def _mixer(self, spec: AttentionSpec | GatedDeltaSpec, k: int) -> Attention | DeltaNet:
        if isinstance(spec, GatedDeltaSpec):
            return DeltaNet(spec, self.residual.scale)
        scales = self.spec.kv_scales.get(k, KVScales()) if self.fp8_kv else None
        return Attention(spec, self.page_size, self.residual.scale, scales)

    def _add(self, k: int, layer: LayerSpec, hidden: Value, delta: Value) -> tuple[Value, Value]:
        """Return the next norm's rows, and the stream after layer ``k``."""
        b, output = self.b, f"layers.{k}.output"
        last = k + 1 == self.spec.num_layers
        name = "norm" if last else f"layers.{k + 1}.input_layernorm"
        norm = self.spec.norm if last else self.spec.layers[k + 1].norm
        if layer.visual_level is None:
            weight = self.spec.tensors[f"{name}.weight"]
            normed, hidden = self.residual.add_norm(b, delta, hidden, weight, norm, (name, output))
            self.outputs.append(hidden)
            return normed, hidden
        # as in transformers: the layer's output is rounded first, then the level is added
        before = self.residual.add(b, hidden, delta, f"{output}_pre_deepstack")
        level = self.levels[layer.visual_level]
        level = self.residual.enter(b, level, f"deepstack_stream.{layer.visual_level}")
        hidden = self.residual.add(b, before, level, output)
        self.outputs.append(before if self.aux_before_level else hidden)
        return self._norm(hidden, name, norm), hidden

    def _norm(self, hidden: Value, name: str, norm: NormSpec) -> Value:
        weight = self.spec.tensors[f"{name}.weight"]
        return self.residual.norm(self.b, hidden, weight, norm, name)


def _check_aux_layers(aux_layers: tuple[int, ...], num_layers: int) -> None:
    for k in aux_layers:
        if not 0 <= k < num_layers:
            raise UserError(
                f"aux_layers {list(aux_layers)}: layer {k} does not exist in a target of "
                f"{num_layers} layers (0 to {num_layers - 1}). Correct draft.overrides.aux_layers, "
                "or use the draft of this target."
            )


def _visual_levels(b: GraphBuilder, spec: TargetSpec) -> list[Value]:
    """Declare the input of visual levels, and return each level as ``[n, H]``; none without levels.

    ``Split`` is used because TensorRT 8.6 cannot build a ``Gather`` beside plugins.
    """
    num, hidden = spec.num_visual_levels, spec.hidden_size
    if num == 0:
        return []
    stacked = b.input("deepstack_embeds", b.dtype, (num, "batch", "seq", hidden))
    flat = b.reshape(stacked, (num, -1, hidden), name="deepstack_rows")
    levels = b.split(flat, [1] * num, [f"deepstack_level.{i}" for i in range(num)], axis=0)
    return [b.reshape(level, (-1, hidden), name=f"deepstack.{i}") for i, level in enumerate(levels)]
