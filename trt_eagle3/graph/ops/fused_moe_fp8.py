"""``FusedMoe`` of experts with FP8 weights, for a plugin.

No graph of ours contains it. A backend that keeps weights packed substitutes it. Weights and scales
of an expert are those of ``LinearFp8``.

Shapes: as ``fused_moe.py``; gate_up int32 [E, 2 I, H / 4], down int32 [E, H, I / 4]; a scale of a
weight [E, N, K]: float32 [E, N or ceil(N / 128) or 1, 1 or K / 128].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trt_eagle3.graph.ops.fused_moe import mixture, moe_lowering, renamed
from trt_eagle3.graph.ops.linear_fp8 import BYTES, NUMBERS, SCALES, byte_values
from trt_eagle3.graph.ops.op import Op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FUSED_MOE_FP8", "fused_moe_fp8"]


def fused_moe_fp8(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    *,
    top_k: int,
    renormalise: int,
) -> Tensor:
    """Compute ``fused_moe`` with ``weight * scale``, rounded to x's type."""
    parts = (_values(gate_up, gate_up_scale), _values(down, down_scale))
    return mixture(x, router_logits, parts, top_k=top_k, renormalise=renormalise)


def _values(weight: Tensor, scale: Tensor) -> Callable[[int], Tensor]:
    import torch

    def values(expert: int) -> Tensor:
        codes = weight[expert].contiguous().view(torch.float8_e4m3fn).float()
        return byte_values(codes, scale[expert])

    return values


def _nodes(name: str, cast: str) -> str:
    """Build the nodes that compute ``<name>_weight`` of an expert."""
    nodes = renamed(BYTES + NUMBERS + SCALES, f"{name}_of_", ("weight", "scale"))
    return f"""
        {name}_of_weight = Gather ({name}, expert)
        {name}_of_scale = Gather ({name}_scale, expert)
        {nodes}
        {name}_weight = {cast.replace("VALUES", f"{name}_of_scaled")}
    """


def _lowering(cast: str, *, opset_17: bool) -> str:
    return moe_lowering(_nodes("gate_up", cast), _nodes("down", cast), opset_17=opset_17)


FUSED_MOE_FP8 = Op(
    inputs={"": ("x", "router_logits", "gate_up", "gate_up_scale", "down", "down_scale")},
    outputs={"": ("y",)},
    attributes={"": ("top_k", "renormalise")},
    types={
        **dict.fromkeys(("gate_up", "down"), "int32"),
        **dict.fromkeys(("gate_up_scale", "down_scale"), "float32"),
    },
    lowering={"": _lowering("CastLike (VALUES, x)", opset_17=False)},
    lowering_17={"": _lowering("Cast <to = TYPE> (VALUES)", opset_17=True)},
    torch_function=fused_moe_fp8,
    plugin="FusedMoeFp8",
)
