"""A layer of linear attention: projections, ``GatedDelta``, and the layer's states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnx import TensorProto

from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.dtype import dtype_of_onnx
from trt_eagle3.graph.builder import GraphBuilder, Value
from trt_eagle3.graph.decoder import Context
from trt_eagle3.spec import GatedDeltaSpec, StateSpec

__all__ = ["DeltaNet"]

_PROJECTIONS = {"qkvz": ("in_proj_qkv", "in_proj_z"), "ba": ("in_proj_b", "in_proj_a")}
_IN_FLOAT32 = ("A_log", "dt_bias")  # exponents: 16 bits would change the decay of a state


@dataclass(frozen=True)
class DeltaNet:
    """One layer of the geometry ``spec``.

    ``output_scale`` multiplies ``out_proj`` (``graph/residual.py``).
    """

    spec: GatedDeltaSpec
    output_scale: float = 1.0

    def emit(
        self,
        b: GraphBuilder,
        x: Value,
        tensors: Mapping[str, TensorRef],
        context: Context,
        layer: int,
    ) -> Value:
        """Compute the layer with out_proj: ``x [n, H]`` -> ``[n, H]``; updates states ``layer``."""
        prefix, spec = f"layers.{layer}.linear_attn.", self.spec
        with b.scope("linear_attn"):
            joined = {name: self._project(b, x, tensors, prefix, name) for name in _PROJECTIONS}
            states = self.states(layer, dtype_of_onnx(b.dtype).name)
            buffers = [b.state(state) for state in states]
            out, *updated = b.own_op(
                "GatedDelta",
                *joined.values(),
                b.weight(tensors[f"{prefix}conv1d.weight"]),
                *(b.weight(tensors[prefix + n], dtype=TensorProto.FLOAT) for n in _IN_FLOAT32),
                b.weight(tensors[f"{prefix}norm.weight"]),
                *buffers,
                *context.entries,
                context.tree_mask,
                names=("out", "conv_state", "delta_state", "conv_rows", "delta_rows"),
                dtypes=(b.dtype, *(buffer.dtype for buffer in buffers), b.dtype, TensorProto.FLOAT),
                num_k_heads=spec.num_k_heads,
                num_v_heads=spec.num_v_heads,
                epsilon=spec.norm.eps,
            )
            widths = (spec.channels, spec.k_width + spec.v_width + 2 * spec.num_v_heads)
            for i, state in enumerate(states):
                b.update_state(state, updated[i])
                b.output(updated[2 + i], state.rows_name, ("batch", "kept", widths[i]))
            weight = tensors[f"{prefix}out_proj.weight"]
            return b.linear(out, [weight], name="output", scales=[self.output_scale])

    def _project(
        self, b: GraphBuilder, x: Value, tensors: Mapping[str, TensorRef], prefix: str, name: str
    ) -> Value:
        """Compute q, k, v and z, or b and a, of all heads next to each other."""
        if not self.spec.interleaved:
            parts = [tensors[f"{prefix}{part}.weight"] for part in _PROJECTIONS[name]]
            return b.linear(x, parts, name=name)
        fused = tensors[f"{prefix}in_proj_{name}.weight"]
        weight = b.rows_of(fused, self._rows_by_kind(name), f"{name}.weight")
        return b.op("Gemm", x, weight, name=name, transB=1)

    def _rows_by_kind(self, name: str) -> list[tuple[int, int]]:
        """Return first and end of each key head's rows of q, then of k, ... in a projection."""
        spec = self.spec
        each = spec.num_v_heads // spec.num_k_heads
        values = each * spec.value_dim
        widths = {"qkvz": (spec.key_dim, spec.key_dim, values, values), "ba": (each, each)}[name]
        starts = [sum(widths[:kind]) for kind in range(len(widths))]
        heads = [head * sum(widths) for head in range(spec.num_k_heads)]
        return [
            (head + start, head + start + width)
            for start, width in zip(starts, widths, strict=True)
            for head in heads
        ]

    def states(self, layer: int, dtype: str) -> tuple[StateSpec, StateSpec]:
        """Return the states of ``layer`` per sequence.

        They are the rows for its next convolution, and the matrices of its heads.
        """
        spec = self.spec
        window = (spec.conv_width - 1, spec.channels)
        matrices = (spec.num_v_heads, spec.key_dim, spec.value_dim)
        return (
            StateSpec(f"conv_state.{layer}", "window", window, dtype),
            StateSpec(f"delta_state.{layer}", "delta", matrices, "float32"),
        )
