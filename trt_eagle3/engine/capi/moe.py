"""Kernels of ``FusedMoe`` for experts of each form, and kernels around the stock grouped products
of prompts.

Shapes: n rows, H hidden, E experts, I inner width, k experts of a row, C chunks of 64 rows. T is
float16 or bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trt_eagle3.graph.ops.kernel import Kernel, KernelCall

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "DENSE_EXPERT_COLUMNS",
    "MAX_EXPERTS",
    "MAX_FEW_MOE_ROWS",
    "MAX_TOP_K",
    "MOE_KERNELS",
    "ROUTE_CHUNK",
    "combine_rows_call",
    "fused_moe_call",
    "fused_moe_fp8_call",
    "fused_moe_int4_call",
    "gather_rows_call",
    "route_rows_call",
]

MAX_FEW_MOE_ROWS = 64  # ``fused_moe`` takes this many rows for any sizes, on any chip
MAX_EXPERTS, MAX_TOP_K = 512, 16
DENSE_EXPERT_COLUMNS = (16, 8)  # H and I of dense experts must be multiples of these
ROUTE_CHUNK = 64  # rows whose experts a block counts

_SUM = """y = sum over a row's top_k experts e of w[e] * down[e] . (silu(gate[e] . x) *
(up[e] . x)); w is the softmax of the row's logits in float32, over all experts, or over its
own top_k with renormalise. Of equal logits the first is chosen. Inner values are rounded to T, sums
are float32, y is rounded once."""
_LIMITS = """For more than 64 rows, or 1024 / k, each expert's part is rounded to T before it is
weighted. So many rows need Hopper, and H and I that are multiples of 128. TE3_NOT_SUPPORTED
otherwise, for float32, and if shared memory does not hold a row's spans. At most 512 experts, 16
of a row."""
_COLUMNS = "H must be a multiple of {}, I of {}.".format(*DENSE_EXPERT_COLUMNS)
_PACKED = "H and I must be multiples of 128; weights, scales and zero points as"
_WORKSPACE = """Bytes of device memory, aligned to 16, that the kernel needs besides its tensors:
the inner values, T [n * k, I]; for more than 64 rows also each row once for each of its experts,
T [n * k, H], and their positions. Its content is not used after the launch."""
_ROUTED = {"x": "T [n, H]", "router_logits": "T [n, E]"}
_OUT = {"y": "T [n, H]"}
_SCALARS: dict[str, tuple[type[int] | type[float], str]] = {
    "top_k": (int, ""),
    "renormalise": (int, "0 or 1"),
}
_SIZES = """
    int32_t num_rows;     // n
    int32_t num_experts;  // E
    int32_t hidden;       // H
    int32_t width;        // I
    DType dtype;
    """

FUSED_MOE = Kernel(
    name="fused_moe",
    params="FusedMoeParams",
    doc=f"{_SUM} {_LIMITS} {_COLUMNS}",
    tensors={
        **_ROUTED,
        "gate_up": "T [E, 2 * I, H], gate first",
        "down": "T [E, H, I]",
        **_OUT,
    },
    writes=("y",),
    scalars=_SCALARS,
    sizes=_SIZES,
    workspace=_WORKSPACE,
)

FUSED_MOE_FP8 = Kernel(
    name="fused_moe_fp8",
    params="FusedMoeFp8Params",
    doc=f"fused_moe with FP8 experts. {_PACKED} linear_fp8's.",
    tensors={
        **_ROUTED,
        "gate_up": "float8_e4m3fn [E, 2 * I, H], packed",
        "gate_up_scale": "float32 [E, 2 * I or ceil(2 * I / 128) or 1, 1 or H / 128]",
        "down": "float8_e4m3fn [E, H, I], packed",
        "down_scale": "float32 [E, H or ceil(H / 128) or 1, 1 or I / 128]",
        **_OUT,
    },
    writes=("y",),
    scalars=_SCALARS,
    sizes=f"""{_SIZES.rstrip()}
    int32_t gate_up_scale_rows;
    int32_t gate_up_scale_columns;
    int32_t down_scale_rows;
    int32_t down_scale_columns;
    """,
    workspace=_WORKSPACE,
)

FUSED_MOE_INT4 = Kernel(
    name="fused_moe_int4",
    params="FusedMoeInt4Params",
    doc=f"fused_moe with INT4 experts. {_PACKED} linear_int4's; both with equal groups and types.",
    tensors={
        **_ROUTED,
        "gate_up": "int32 [E, 2 * I, H / 8], packed codes 0 to 15",
        "gate_up_scale": "float16 or bfloat16 [E, 2 * I, H / group]",
        "gate_up_zero_point": "uint8 [E, 2 * I, H / group], or null data with down's: 8",
        "down": "int32 [E, H, I / 8], packed codes 0 to 15",
        "down_scale": "float16 or bfloat16 [E, H, I / group]",
        "down_zero_point": "uint8 [E, H, I / group]",
        **_OUT,
    },
    writes=("y",),
    scalars=_SCALARS,
    sizes=f"""{_SIZES.rstrip()}
    int32_t group;        // columns of a scale
    DType scale_dtype;
    """,
    workspace=_WORKSPACE,
)

ROUTE_ROWS = Kernel(
    name="route_rows",
    params="RouteRowsParams",
    doc="""The experts of each row of router_logits, the most probable first, with their shares, as
fused_moe chooses them; the number of rows of each 64 that go through each expert, and each row's
index among those. At most 512 experts, 16 of a row.""",
    tensors={
        "router_logits": "T [n, E]",
        "experts": "int32 [n, k]",
        "shares": "float32 [n, k]",
        "places": "int32 [n, k], index among the expert's rows of its 64",
        "counts": "int32 [ceil(n / 64), E]",
    },
    writes=("experts", "shares", "places", "counts"),
    scalars={"renormalise": (int, "0 or 1")},
    sizes="""
    int32_t num_rows;     // n
    int32_t num_experts;  // E
    int32_t top_k;        // k
    DType dtype;
    """,
)

GATHER_ROWS = Kernel(
    name="gather_rows",
    params="GatherRowsParams",
    doc="""Copies each row of x once for each of its experts, sorted by expert, from the outputs of
route_rows. Row positions[i, r] of gathered is row i of x, for its expert experts[i, r]; the rows
of expert e end at ends[e]. H must be a multiple of 8.""",
    tensors={
        "x": "T [n, H]",
        "experts": "int32 [n, k]",
        "places": "int32 [n, k]",
        "counts": "int32 [ceil(n / 64), E]",
        "gathered": "T [n * k, H]",
        "positions": "int32 [n, k]",
        "ends": "int32 [E]",
    },
    writes=("gathered", "positions", "ends"),
    scalars={},
    sizes="""
    int32_t num_rows;     // n
    int32_t num_experts;  // E
    int32_t hidden;       // H
    int32_t top_k;        // k
    DType dtype;
    """,
)

COMBINE_ROWS = Kernel(
    name="combine_rows",
    params="CombineRowsParams",
    doc="""y[i] = sum over r of shares[i, r] * parts[positions[i, r]], in float32 and in the order
of r, rounded once. H must be a multiple of 8.""",
    tensors={
        "parts": "T [n * k, H]",
        "positions": "int32 [n, k]",
        "shares": "float32 [n, k]",
        "y": "T [n, H]",
    },
    writes=("y",),
    scalars={},
    sizes="""
    int32_t num_rows;  // n
    int32_t hidden;    // H
    int32_t top_k;     // k
    DType dtype;
    """,
)

MOE_KERNELS = (
    FUSED_MOE,
    FUSED_MOE_FP8,
    FUSED_MOE_INT4,
    ROUTE_ROWS,
    GATHER_ROWS,
    COMBINE_ROWS,
)


def fused_moe_call(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    top_k: int,
    renormalise: int,
    out: Tensor | None = None,
) -> KernelCall[Tensor]:
    """Compute the weighted sum of the outputs of each row's experts.

    Args:
        x: T [n, H]. router_logits: T [n, E]. gate_up: T [E, 2 I, H], gate first. down: T
            [E, H, I].
        renormalise: 1: a row's ``top_k`` weights sum to 1.
    Raises:
        ValueError: a tensor does not fit; the message names it.
        NotImplementedError: float32, or too many rows for this chip or these sizes.
    """
    out = x.new_empty(x.shape) if out is None else out
    weights = {"gate_up": gate_up, "down": down}
    return _moe_call(FUSED_MOE, x, router_logits, weights, out, top_k, renormalise)


def fused_moe_fp8_call(
    x: Tensor,
    router_logits: Tensor,
    gate_up: tuple[Tensor, Tensor],
    down: tuple[Tensor, Tensor],
    *,
    top_k: int,
    renormalise: int,
    out: Tensor | None = None,
) -> KernelCall[Tensor]:
    """Compute ``fused_moe_call`` with FP8 experts: codes and scales as in ``linear_fp8_call``, with
    an axis of experts before the rows.
    """
    out = x.new_empty(x.shape) if out is None else out
    names = ("gate_up", "gate_up_scale", "down", "down_scale")
    weights = dict(zip(names, (*gate_up, *down), strict=True))
    return _moe_call(FUSED_MOE_FP8, x, router_logits, weights, out, top_k, renormalise)


def fused_moe_int4_call(
    x: Tensor,
    router_logits: Tensor,
    gate_up: tuple[Tensor, Tensor, Tensor | None],
    down: tuple[Tensor, Tensor, Tensor | None],
    *,
    top_k: int,
    renormalise: int,
    out: Tensor | None = None,
) -> KernelCall[Tensor]:
    """Compute ``fused_moe_call`` with INT4 experts: codes, scales and zero points as in
    ``linear_int4_call``, with an axis of experts before the rows.
    """
    out = x.new_empty(x.shape) if out is None else out
    names = [f"{w}{part}" for w in ("gate_up", "down") for part in ("", "_scale", "_zero_point")]
    weights = dict(zip(names, (*gate_up, *down), strict=True))
    return _moe_call(FUSED_MOE_INT4, x, router_logits, weights, out, top_k, renormalise)


def _moe_call(
    kernel: Kernel,
    x: Tensor,
    router_logits: Tensor,
    weights: Mapping[str, Tensor | None],
    out: Tensor,
    top_k: int,
    renormalise: int,
) -> KernelCall[Tensor]:
    tensors = {"x": x, "router_logits": router_logits, **weights, "y": out}
    return KernelCall(kernel, tensors, {"top_k": top_k, "renormalise": renormalise}, out)


def route_rows_call(
    router_logits: Tensor, *, top_k: int, renormalise: int
) -> KernelCall[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return ``(experts, shares, places, counts)`` (see ``ROUTE_ROWS``) for any number of rows."""
    import torch

    rows, num_experts = router_logits.shape
    empty = torch.empty((rows, top_k), dtype=torch.int32, device=router_logits.device)
    counts = empty.new_empty(-(-rows // ROUTE_CHUNK), num_experts)
    shares = torch.empty_like(empty, dtype=torch.float32)
    result = (empty, shares, torch.empty_like(empty), counts)
    tensors = dict(zip(ROUTE_ROWS.tensors, (router_logits, *result), strict=True))
    return KernelCall(ROUTE_ROWS, tensors, {"renormalise": renormalise}, result)


def gather_rows_call(
    x: Tensor, experts: Tensor, places: Tensor, counts: Tensor
) -> KernelCall[tuple[Tensor, Tensor, Tensor]]:
    """Return ``(gathered, positions, ends)``; see ``GATHER_ROWS``."""
    import torch

    gathered = x.new_empty(experts.numel(), x.shape[1])
    result = (gathered, torch.empty_like(experts), counts.new_empty(counts.shape[1]))
    inputs = (x, experts, places, counts, *result)
    return KernelCall(GATHER_ROWS, dict(zip(GATHER_ROWS.tensors, inputs, strict=True)), {}, result)


def combine_rows_call(parts: Tensor, positions: Tensor, shares: Tensor) -> KernelCall[Tensor]:
    """Return the weighted sums T [n, H] of ``parts``, T [n * k, H]."""
    y = parts.new_empty(len(positions), parts.shape[1])
    tensors = {"parts": parts, "positions": positions, "shares": shares, "y": y}
    return KernelCall(COMBINE_ROWS, tensors, {}, y)
