"""``FusedMoe`` of experts with INT4 weights, for a plugin.

No graph of ours contains it. A backend that keeps weights packed substitutes it. Weights, scales
and zero points of an expert are those of ``LinearInt4``, as int32 that hold bytes.

Shapes: as ``fused_moe.py``; gate_up int32 [E, 2 I, H / 8], down int32 [E, H, I / 8]; of a weight
[E, N, K] in G groups of columns: scale int32 [E, N / 2, G], zero_point int32 [E, N / 4, G].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trt_eagle3.graph.ops.fused_moe import mixture, moe_lowering, renamed
from trt_eagle3.graph.ops.linear_int4 import INT4_VALUES, int4_values
from trt_eagle3.graph.ops.op import Op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FUSED_MOE_INT4", "fused_moe_int4"]


def fused_moe_int4(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    gate_up_zero_point: Tensor | None = None,
    down_zero_point: Tensor | None = None,
    *,
    top_k: int,
    renormalise: int,
    scale_type: int,
) -> Tensor:
    """Compute ``fused_moe`` with ``(weight - zero_point) * scale``, rounded to x's type.

    ``scale_type``: 10 (float16) or 16 (bfloat16).
    """
    parts = (
        _values(gate_up, gate_up_scale, gate_up_zero_point, scale_type),
        _values(down, down_scale, down_zero_point, scale_type),
    )
    return mixture(x, router_logits, parts, top_k=top_k, renormalise=renormalise)


def _values(
    weight: Tensor, scale: Tensor, zero_point: Tensor | None, scale_type: int
) -> Callable[[int], Tensor]:
    def values(expert: int) -> Tensor:
        zeros = None if zero_point is None else zero_point[expert]
        return int4_values(weight[expert], scale[expert], zeros, scale_type)

    return values


def _nodes(name: str, overload: str, cast: str) -> str:
    """Build the nodes that compute ``<name>_weight`` of an expert."""
    inputs = ("weight", "scale", *(["zero_point"] if overload else []))
    nodes = renamed(INT4_VALUES[overload], f"{name}_of_", inputs)
    gathered = [f"{name}_of_{i} = Gather ({name}_{i}, expert)" for i in inputs[1:]]
    return "\n".join(
        [
            f"{name}_of_weight = Gather ({name}, expert)",
            *gathered,
            nodes,
            f"{name}_weight = {cast.replace('VALUES', f'{name}_of_scaled')}",
        ]
    )


def _lowerings(cast: str, *, opset_17: bool) -> dict[str, str]:
    return {
        overload: moe_lowering(
            _nodes("gate_up", overload, cast), _nodes("down", overload, cast), opset_17=opset_17
        )
        for overload in INT4_VALUES
    }


_INPUTS = ("x", "router_logits", "gate_up", "gate_up_scale", "down", "down_scale")
_ZEROS = ("gate_up_zero_point", "down_zero_point")

FUSED_MOE_INT4 = Op(
    inputs={"": _INPUTS, "zeros": (*_INPUTS, *_ZEROS)},
    outputs={"": ("y",), "zeros": ("y",)},
    attributes=dict.fromkeys(("", "zeros"), ("top_k", "renormalise", "scale_type")),
    types=dict.fromkeys((*_INPUTS[2:], *_ZEROS), "int32"),
    lowering=_lowerings("CastLike (VALUES, x)", opset_17=False),
    lowering_17=_lowerings("Cast <to = TYPE> (VALUES)", opset_17=True),
    torch_function=fused_moe_int4,
    plugin="FusedMoeInt4",
)
