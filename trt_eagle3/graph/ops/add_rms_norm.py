"""``y = RMSNorm(x [+ residual]) * weight``, computed in float32; ``sum = x + residual``.

The ``offset`` forms multiply by ``weight + weight_offset``, also in float32. Gemma's and Qwen3.5's
norms need them, since their weights are stored minus one.

Shapes: x, residual, y, sum [n, H]; weight [H]. T is the type of weight and y; x is X; residual and
sum are R. X and R are T, or float32 where the residual stream is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trt_eagle3.graph.ops.kernel import Kernel, KernelCall
from trt_eagle3.graph.ops.op import Op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ADD_RMS_NORM",
    "EPSILON_17",
    "KERNEL",
    "NORM_17",
    "NORM_OFFSET_17",
    "OFFSET_NORM",
    "add_rms_norm",
    "add_rms_norm_call",
]

KERNEL = Kernel(
    name="add_rms_norm",
    params="AddRmsNormParams",
    doc="""sum = x + residual; y = RMSNorm(sum) * weight. Without a residual (null data),
y = RMSNorm(x) * weight, and there is no sum. The residual stream may be float32 if T is not:
residual and sum, with x of either type; without a residual, x.""",
    tensors={
        "x": "T or float32 [n, H]",
        "residual": "T or float32 [n, H], or null data with sum's",
        "weight": "T [H]; the factor is weight + weight_offset",
        "y": "T [n, H]",
        "sum": "[n, H], of residual's type",
    },
    writes=("y", "sum"),
    scalars={"epsilon": (float, ""), "weight_offset": (float, "")},
    sizes="""
    int32_t num_rows;
    int32_t hidden;
    DType dtype;           // T
    DType x_dtype;         // X: T or float32; T if there is a 16-bit residual
    DType residual_dtype;  // R: T or float32; not read without a residual
    """,
)

_UNIT_17 = """
    {x}_f32 = Cast <to = 1> ({x})
    {x}_square = Mul ({x}_f32, {x}_f32)
    {x}_mean = ReduceMean <axes = [-1], keepdims = 1> ({x}_square)
    {x}_shifted = Add ({x}_mean, eps)
    {x}_root = Sqrt ({x}_shifted)
    {x}_unit = Div ({x}_f32, {x}_root)
"""
# RMSNorm of {x} in opset 17; requires eps
NORM_17 = (
    _UNIT_17
    + """
    {x}_typed = Cast <to = TYPE> ({x}_unit)
    {y} = Mul ({x}_typed, {weight})
"""
)
# the same for weights that are stored minus an offset
NORM_OFFSET_17 = (
    _UNIT_17
    + """
    {x}_offset = Constant <value_float: float = @weight_offset> ()
    {x}_weight_f32 = Cast <to = 1> ({weight})
    {x}_weight = Add ({x}_weight_f32, {x}_offset)
    {x}_scaled = Mul ({x}_unit, {x}_weight)
    {y} = CastLike ({x}_scaled, {weight})
"""
)
EPSILON_17 = "eps = Constant <value_float: float = @epsilon> ()\n"

OFFSET_NORM = """
    {y}_offset = Constant <value_float: float = @weight_offset> ()
    {y}_stored = Cast <to = 1> ({weight})
    {y}_weight = Add ({y}_stored, {y}_offset)
    {y}_x = Cast <to = 1> ({x})
    {y}_f32 = RMSNormalization <axis = -1, epsilon: float = @epsilon> ({y}_x, {y}_weight)
    {y} = CastLike ({y}_f32, {weight})
"""

_INPUTS = {
    "": ("x", "weight"),
    "residual": ("x", "weight", "residual"),
    "offset": ("x", "weight"),
    "residual_offset": ("x", "weight", "residual"),
}


def add_rms_norm(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    *,
    epsilon: float,
    weight_offset: float = 0.0,
) -> Any:
    """Compute ``RMSNorm(x) * weight`` in float32.

    With a residual: ``(RMSNorm(x + residual) * weight, x + residual)``.
    """
    import torch

    total = x if residual is None else x + residual
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    if weight_offset:
        y = (normed * (weight.float() + weight_offset)).to(weight.dtype)
    else:
        y = normed.to(weight.dtype) * weight
    return y if residual is None else (y, total)


def add_rms_norm_call(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    *,
    epsilon: float,
    weight_offset: float = 0.0,
    out: tuple[Tensor, Tensor | None] | None = None,
) -> KernelCall[tuple[Tensor, Tensor | None]]:
    """Build the kernel call for ``(RMSNorm(x + residual) * weight, x + residual)``.

    Without a residual: ``(RMSNorm(x) * weight, None)``.

    Args:
        x, residual: T [n, H], or float32 if the residual stream is.
        weight: T [H]. ``y`` has the weight's type, ``sum`` the residual's.
        out: tensors for the two results; ``sum`` may be ``residual`` itself and ``y`` may be ``x``.
    Raises:
        ValueError: a tensor does not fit; the message names it.
    """
    import torch

    if out is None:
        total = None if residual is None else torch.empty_like(residual)
        out = (torch.empty_like(x, dtype=weight.dtype), total)
    tensors = {"x": x, "residual": residual, "weight": weight, "y": out[0], "sum": out[1]}
    return KernelCall(KERNEL, tensors, {"epsilon": epsilon, "weight_offset": weight_offset}, out)


def _node_call(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    *,
    epsilon: float,
    weight_offset: float = 0.0,
) -> KernelCall[Any]:
    """Build the call of a node, which has one output if there is no residual."""
    call = add_rms_norm_call(x, weight, residual, epsilon=epsilon, weight_offset=weight_offset)
    result = call.result if residual is not None else call.result[0]
    return KernelCall(KERNEL, call.tensors, call.scalars, result)


def _plugin_values(inputs: Sequence[int], outputs: Sequence[int]) -> Mapping[str, int]:
    values = {"num_outputs": len(outputs), "x_type": inputs[0]}
    return values if len(outputs) == 1 else {**values, "residual_type": outputs[1]}


ADD_RMS_NORM = Op(
    inputs=_INPUTS,
    outputs={name: ("y", "sum") if "residual" in _INPUTS[name] else ("y",) for name in _INPUTS},
    attributes={
        "": ("epsilon",),
        "residual": ("epsilon",),
        "offset": ("epsilon", "weight_offset"),
        "residual_offset": ("epsilon", "weight_offset"),
    },
    float_attributes=("epsilon", "weight_offset"),
    types={"x": "X", "residual": "R", "sum": "R"},
    lowering={
        "": "y = RMSNormalization <axis = -1, epsilon: float = @epsilon> (x, weight)",
        "residual": """
            sum = Add (x, residual)
            y = RMSNormalization <axis = -1, epsilon: float = @epsilon> (sum, weight)
        """,
        "offset": OFFSET_NORM.format(x="x", y="y", weight="weight"),
        "residual_offset": "sum = Add (x, residual)\n"
        + OFFSET_NORM.format(x="sum", y="y", weight="weight"),
    },
    lowering_17={
        "": EPSILON_17 + NORM_17.format(x="x", y="y", weight="weight"),
        "residual": EPSILON_17
        + "sum = Add (x, residual)\n"
        + NORM_17.format(x="sum", y="y", weight="weight"),
        "offset": EPSILON_17 + NORM_OFFSET_17.format(x="x", y="y", weight="weight"),
        "residual_offset": EPSILON_17
        + "sum = Add (x, residual)\n"
        + NORM_OFFSET_17.format(x="sum", y="y", weight="weight"),
    },
    torch_function=add_rms_norm,
    kernel=KERNEL,
    kernel_call=_node_call,
    plugin="AddRmsNorm",
    plugin_attributes=("num_outputs", "x_type", "residual_type"),
    plugin_values=_plugin_values,
)
