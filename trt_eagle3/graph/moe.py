"""The MLP of a decoder layer: dense, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping

from trt_eagle3.checkpoint.experts import ExpertsRef
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.graph.builder import GraphBuilder, Value
from trt_eagle3.graph.decoder import swiglu
from trt_eagle3.spec import DenseMlp, SparseMoe

__all__ = ["mlp"]


def mlp(
    b: GraphBuilder,
    x: Value,
    tensors: Mapping[str, TensorRef],
    prefix: str,
    spec: DenseMlp | SparseMoe,
    scale: float = 1.0,
) -> Value:
    """Compute a layer's MLP of ``x [n, H]``; ``scale`` multiplies ``up``, and so the result."""
    if isinstance(spec, SparseMoe):
        return _sparse_moe(b, x, tensors, prefix, spec, scale)
    return swiglu(b, x, tensors, prefix, bias=False, scale=scale)


def _sparse_moe(
    b: GraphBuilder,
    x: Value,
    tensors: Mapping[str, TensorRef],
    prefix: str,
    spec: SparseMoe,
    scale: float,
) -> Value:
    """Run ``x [n, H]`` through its experts, and through the shared one if there is one.

    ``scale`` multiplies ``up``, and so the result.
    """
    gate_up, down = (tensors[f"{prefix}experts.{p}_proj"] for p in ("gate_up", "down"))
    assert isinstance(gate_up, ExpertsRef), gate_up.name
    assert isinstance(down, ExpertsRef), down.name
    with b.scope("mlp"):
        logits = b.linear(x, [tensors[f"{prefix}gate.weight"]], name="router_logits")
        weights = (b.experts(gate_up, "experts.gate_up", scale), b.experts(down, "experts.down"))
        name = "experts.output" if spec.shared_expert_width else "output"
        routed = b.own_op(
            "FusedMoe",
            *(x, logits, *weights),
            names=(name,),
            top_k=spec.top_k,
            renormalise=int(spec.renormalise),
        )[0]
        if not spec.shared_expert_width:
            return routed
        with b.scope("shared_expert"):
            shared = swiglu(b, x, tensors, f"{prefix}shared_expert.", bias=False, scale=scale)
            logit = b.linear(x, [tensors[f"{prefix}shared_expert_gate.weight"]], name="gate_logit")
            opened = b.op("Mul", shared, b.op("Sigmoid", logit, name="gate"), name="output")
        return b.op("Add", routed, opened, name="output")
