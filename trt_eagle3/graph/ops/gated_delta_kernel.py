"""The CUDA kernel of ``GatedDelta``; shapes as in ``gated_delta.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_eagle3.graph.ops.gated_delta_lowering import TREE_ROWS
from trt_eagle3.graph.ops.kernel import Kernel, KernelCall

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KERNEL", "gated_delta_call"]

KERNEL = Kernel(
    name="gated_delta",
    params="GatedDeltaParams",
    doc="""A causal convolution over the path of each row and silu, q and k normalised to length
one, the gated delta rule along the path, and RMSNorm by heads times silu(z). Reads the states at
state_reads[b]. Writes those after the first certain[b] rows at state_writes[b], which differs from
every entry that is read. Also outputs the first 64 rows, which advance states later
(te3_commit_delta, te3_commit_window). Rows attend as in tree_mask; more than 64 rows must be a
chain, and the mask is not read. In 16 bits, more than 16 rows use tensor cores, whose operands are
rounded to T. TE3_NOT_SUPPORTED for heads wider than 128 or not a multiple of 4, for more than 8
taps, and before Hopper for trees that do not fit into shared memory.""",
    tensors={
        "qkvz": "T [B * S, C + Hv * Dv], C = 2 * Hk * Dk + Hv * Dv",
        "ba": "T [B * S, 2 * Hv]",
        "conv_weight": "T [C, 1, W], the last tap is the row's own",
        "a_log": "float32 [Hv]",
        "dt_bias": "float32 [Hv]",
        "norm": "T [Dv]",
        "conv_state": "T [E, W - 1, C], updated in place",
        "delta_state": "float32 [E, Hv, Dk, Dv], updated in place",
        "state_reads": "int32 [B]",
        "state_writes": "int32 [B]",
        "certain": "int32 [B], 0 to S",
        "tree_mask": "bool [B, S, M]: the new rows are the last S columns",
        "out": "T [B * S, Hv * Dv]",
        "conv_rows": "T [B, min(S, 64), C]",
        "delta_rows": "float32 [B, min(S, 64), Hk * Dk + Hv * Dv + 2 * Hv]: k, v, g, beta",
    },
    writes=("conv_state", "delta_state", "out", "conv_rows", "delta_rows"),
    scalars={
        "num_k_heads": (int, "Hk"),
        "num_v_heads": (int, "Hv, a multiple of Hk"),
        "epsilon": (float, ""),
        "blocks_per_head": (
            int,
            "only for tests and measurements, as chunk_rows; without tensor cores; 0: chosen",
        ),
        "chunk_rows": (int, "rows of a chain, solved as one system"),
        "prefetch_safe": (
            int,
            "1: states, entries, certain, tree_mask, conv_weight are (te3_linear_args)",
        ),
    },
    sizes="""
    int32_t batch;
    int32_t num_new;  // S
    int32_t tail;     // M
    int32_t kept;     // rows of conv_rows and delta_rows
    int32_t channels; // C
    int32_t key_dim;
    int32_t value_dim;
    int32_t taps;     // W
    int32_t rows_at_once;  // set by the launcher
    DType dtype;
    """,
    workspace="""Bytes of device memory, aligned to 16, that te3_gated_delta needs besides its
tensors, for more than 16 rows of 16 bits. Smaller shapes need no more. The size is the same on
every device. Its contents are not kept between launches.""",
)


def gated_delta_call(
    *inputs: Tensor,
    num_k_heads: int,
    num_v_heads: int,
    epsilon: float,
    blocks_per_head: int = 0,
    chunk_rows: int = 0,
    prefetch_safe: bool = True,
) -> KernelCall[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Build the kernel call for the op's ``inputs``. States are updated in place.

    Args:
        blocks_per_head, chunk_rows: for tests and measurements; 0: chosen by the launcher.
        prefetch_safe: states, entries, ``certain``, ``tree_mask`` and ``conv_weight`` are older
            than any launch that may still run (see ``linear``). In a graph, only a layer's own
            launch writes its states.
    Raises:
        ValueError: a tensor does not fit; the message names it.
        NotImplementedError: no kernel computes this on this device.
    """
    import torch

    qkvz, conv_state, delta_state, mask = inputs[0], inputs[6], inputs[7], inputs[11]
    (batch, new, _), channels = mask.shape, conv_state.shape[-1]
    kept, values = min(new, TREE_ROWS), num_v_heads * delta_state.shape[-1]
    width = (channels + values) // 2 + 2 * num_v_heads
    made = (
        qkvz.new_empty(len(qkvz), values),
        qkvz.new_empty(batch, kept, channels),
        torch.empty(batch, kept, width, dtype=torch.float32, device=qkvz.device),
    )
    tensors = dict(zip(KERNEL.tensors, (*inputs, *made), strict=True))
    scalars = (num_k_heads, num_v_heads, epsilon, blocks_per_head, chunk_rows, prefetch_safe)
    out, conv_rows, delta_rows = made
    result = (out, conv_state, delta_state, conv_rows, delta_rows)
    return KernelCall(KERNEL, tensors, dict(zip(KERNEL.scalars, scalars, strict=True)), result)
