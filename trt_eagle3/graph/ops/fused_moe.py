"""A mixture of experts: each row goes through the ``top_k`` experts that its router ranks highest.

    p = softmax(router_logits) over all experts, in float32
    y = sum over a row's top_k experts e of w[e] * down[e] . (silu(gate[e] . x) * (up[e] . x))

where w is p, divided by the sum of the row's top_k with ``renormalise``. Equal probabilities are
ordered by expert index in every implementation. The inner values are rounded to T once. Sums and
the weighted sum over experts are float32. y is rounded once.

Shapes: n rows, H hidden, E experts, I inner width. x T [n, H]; router_logits T [n, E]; gate_up T
[E, 2 I, H], gate first; down T [E, H, I]; y T [n, H].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from trt_eagle3.graph.ops.op import Op, Shapes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FUSED_MOE", "fused_moe", "mixture", "moe_lowering", "renamed", "routing"]


def routing(router_logits: Tensor, top_k: int, renormalise: int) -> tuple[Tensor, Tensor]:
    """Return the experts of each row, int64 [n, k], and their weights, float32 [n, k]."""
    import torch

    probabilities = torch.softmax(router_logits.float(), dim=-1)
    weights, experts = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, experts = weights[:, :top_k], experts[:, :top_k]
    return experts, weights / weights.sum(-1, keepdim=True) if renormalise else weights


def fused_moe(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    top_k: int,
    renormalise: int,
) -> Tensor:
    """Compute the weighted sum of the outputs of each row's experts."""
    parts = (gate_up.__getitem__, down.__getitem__)
    return mixture(x, router_logits, parts, top_k=top_k, renormalise=renormalise)


def mixture(
    x: Tensor,
    router_logits: Tensor,
    weights_of: tuple[Callable[[int], Tensor], Callable[[int], Tensor]],
    *,
    top_k: int,
    renormalise: int,
) -> Tensor:
    """Compute ``fused_moe`` with gate_up and down weights from ``weights_of``, by expert index.

    On the CPU, weights of experts without rows are not read. On CUDA (only without our kernel),
    every expert multiplies every row: no shape depends on device values.
    """
    import torch

    experts, weights = routing(router_logits, top_k, renormalise)
    by_expert = torch.zeros(router_logits.shape, dtype=torch.float32, device=x.device)
    by_expert.scatter_(1, experts, weights)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    everything = torch.arange(len(x), device=x.device)
    touched = range(router_logits.shape[1]) if x.is_cuda else experts.unique().tolist()
    gate_up, down = weights_of
    for expert in touched:
        own = by_expert[:, expert]
        rows = everything if x.is_cuda else own.nonzero()[:, 0]
        gate, up = _product(x[rows], gate_up(expert)).chunk(2, dim=-1)
        inner = (torch.nn.functional.silu(gate) * up).to(x.dtype)
        total[rows] += own[rows, None] * _product(inner, down(expert))
    return total.to(x.dtype)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``x @ weight.T`` in float32."""
    import torch

    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.to(x.dtype).T, out_dtype=torch.float32)
    return x.float() @ weight.to(x.dtype).float().T


# Runs the experts that have rows, one after the other. Weights of other experts are not read.
_ROUTING = """
    wide_logits = Cast <to = 1> (router_logits)
    probabilities = Softmax <axis = -1> (wide_logits)
    first = Constant <value_int = 0> ()
    last = Constant <value_ints = [-1]> ()
    k_0 = Constant <value_int : int = @top_k> ()
    k = Unsqueeze (k_0, last)
    largest, experts = TopK <axis = -1> (probabilities, k)
    sums = ReduceSum <keepdims = 1> (largest, last)
    renormalise_0 = Constant <value_int : int = @renormalise> ()
    renormalises = Cast <to = 9> (renormalise_0)
    one = Constant <value_float = 1.0> ()
    divisor = Where (renormalises, sums, one)
    weights = Div (largest, divisor)
    logits_shape = Shape (router_logits)
    no_weights = ConstantOfShape (logits_shape)
    by_expert = ScatterElements <axis = 1> (no_weights, experts, weights)
    ANY
    touched_2d = NonZero (any_row)
    touched = Reshape (touched_2d, last)
    touched_shape = Shape (touched)
    num_touched = Gather (touched_shape, first)
    goes_on = Constant <value = bool {1}> ()
    x_shape = Shape (x)
    nothing = ConstantOfShape (x_shape)
    total = Loop (num_touched, goes_on, nothing) <body = expert_sum
        (int64 i, bool going, float[rows, hidden] sum_before)
        => (bool still_going, float[rows, hidden] sum_after)
    {
        still_going = Identity (going)
        expert = Gather (touched, i)
        own = Gather <axis = 1> (by_expert, expert)
        rows_2d = NonZero (own)
        rows = Reshape (rows_2d, last)
        own_rows = Gather (x, rows)
        GATE_UP
        gate_up_rows = Gemm <transB = 1> (own_rows, gate_up_weight)
        SPLIT
        opened = Sigmoid (gate)
        silu = Mul (gate, opened)
        inner = Mul (silu, up)
        DOWN
        outputs = Gemm <transB = 1> (inner, down_weight)
        wide_outputs = Cast <to = 1> (outputs)
        row_weights = Gather (own, rows)
        row_weights_2d = Unsqueeze (row_weights, last)
        weighted = Mul (wide_outputs, row_weights_2d)
        before_rows = Gather (sum_before, rows)
        after_rows = Add (before_rows, weighted)
        places = Unsqueeze (rows, last)
        sum_after = ScatterND (sum_before, places, after_rows)
    }>
"""
_MODERN = {
    "ANY": """
        axis_0 = Constant <value_ints = [0]> ()
        any_row = ReduceMax <keepdims = 0> (by_expert, axis_0)""",
    "SPLIT": "gate, up = Split <axis = -1, num_outputs = 2> (gate_up_rows)",
}
_OPSET_17 = {
    "ANY": "any_row = ReduceMax <axes = [0], keepdims = 0> (by_expert)",
    "SPLIT": "gate, up = Split <axis = -1> (gate_up_rows)",
}


def moe_lowering(gate_up: str, down: str, *, opset_17: bool = False) -> str:
    """Build the reference lowering.

    Args:
        gate_up, down: nodes that compute ``gate_up_weight`` [2 I, H] and ``down_weight`` [H, I],
            of x's type, of the expert with index ``expert``.
    """
    body = _ROUTING.replace("GATE_UP", gate_up).replace("DOWN", down)
    for name, nodes in (_OPSET_17 if opset_17 else _MODERN).items():
        body = body.replace(name, nodes)
    return body + ("y = Cast <to = TYPE> (total)" if opset_17 else "y = CastLike (total, x)")


def renamed(nodes: str, prefix: str, inputs: tuple[str, ...]) -> str:
    """Prefix every name that ``nodes`` define, and ``inputs``, with ``prefix``."""
    lines = re.findall(r"^\s*([\w, ]+) = [A-Z]", nodes, re.MULTILINE)
    defined = [name.strip() for line in lines for name in line.split(",")]
    names = "|".join(map(re.escape, (*defined, *inputs)))
    return re.sub(rf"(?<!@)\b({names})\b", rf"{prefix}\1", nodes)


_GATE_UP = "gate_up_weight = Gather (gate_up, expert)"
_DOWN = "down_weight = Gather (down, expert)"

_FLOAT32 = 1  # of ``TensorProto``
_MAX_EXPERTS, _MAX_TOP_K = 512, 16
_MULTIPLES = {"hidden": 16, "width": 8}


def _plugin_refuses(attributes: Mapping[str, Any], shapes: Shapes, compute: int) -> str:
    if compute == _FLOAT32:
        return "experts in float32 are not supported, set engine.dtype: float16"
    experts, hidden, width = map(int, shapes["down"])
    if experts > _MAX_EXPERTS:
        return f"expected at most {_MAX_EXPERTS} experts, got {experts}"
    if attributes["top_k"] > _MAX_TOP_K:
        return f"expected at most {_MAX_TOP_K} experts of a row, got {attributes['top_k']}"
    for name, size in (("hidden", hidden), ("width", width)):
        if size % _MULTIPLES[name]:
            return f"experts' {name}: expected a multiple of {_MULTIPLES[name]}, got {size}"
    return ""


FUSED_MOE = Op(
    inputs={"": ("x", "router_logits", "gate_up", "down")},
    outputs={"": ("y",)},
    attributes={"": ("top_k", "renormalise")},
    lowering={"": moe_lowering(_GATE_UP, _DOWN)},
    lowering_17={"": moe_lowering(_GATE_UP, _DOWN, opset_17=True)},
    torch_function=fused_moe,
    plugin="FusedMoe",
    plugin_refuses=_plugin_refuses,
)
