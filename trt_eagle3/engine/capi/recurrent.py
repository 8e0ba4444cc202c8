"""Kernels that advance the states of recurrent layers along the accepted rows.

Shapes: L layers, E entries, B sequences, T rows of a forward, at most K accepted rows; Hk key heads
of Dk, Hv value heads of Dv; W the convolution's width, C its channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_eagle3.graph.ops.kernel import Kernel, KernelCall

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RECURRENT_KERNELS", "commit_delta_call", "commit_window_call"]

_PLACES = {
    "entries": "int32 [B], all different for rows with path[b, 0] >= 0",
    "path": "int32 [B, K], rows of the T, ascending; negative after the last",
}
_SIZES = """
    int32_t num_layers;   // L
    int32_t num_entries;  // E
    int32_t batch;
    int32_t num_rows;     // T
    int32_t num_moves;    // K
"""

COMMIT_DELTA = Kernel(
    name="commit_delta",
    params="CommitDeltaParams",
    doc="""Advances entry entries[b] of every layer by rows path[b] of te3_gated_delta's delta_rows,
one after the other.""",
    tensors={
        "state": "float32 [L * E, Hv, Dk, Dv], updated in place",
        "rows": "float32 [L, B, T, Hk * Dk + Hv * Dv + 2 * Hv]",
        **_PLACES,
    },
    writes=("state",),
    scalars={},
    sizes=f"""{_SIZES.rstrip()}
    int32_t num_k_heads;
    int32_t num_v_heads;
    int32_t key_dim;
    int32_t value_dim;
    """,
)

COMMIT_WINDOW = Kernel(
    name="commit_window",
    params="CommitWindowParams",
    doc="""Advances the window at entry entries[b] of every layer by rows path[b] of
te3_gated_delta's conv_rows.""",
    tensors={
        "state": "T [L, E, W - 1, C], updated in place",
        "rows": "T [L, B, T, C]",
        **_PLACES,
    },
    writes=("state",),
    scalars={},
    sizes=f"""{_SIZES.rstrip()}
    int32_t width;        // W - 1
    int32_t channels;
    DType dtype;
    """,
)

RECURRENT_KERNELS = (COMMIT_DELTA, COMMIT_WINDOW)


def commit_delta_call(
    state: Tensor, rows: Tensor, entries: Tensor, path: Tensor
) -> KernelCall[None]:
    """Advance ``state`` float32 [L, E, Hv, Dk, Dv] in place; see ``COMMIT_DELTA``.

    Raises:
        ValueError: a tensor does not fit; the message names it.
        NotImplementedError: heads are wider than 128, or no multiple of 4.
    """
    inputs = (state.flatten(0, 1), rows, entries, path)
    return KernelCall(COMMIT_DELTA, dict(zip(COMMIT_DELTA.tensors, inputs, strict=True)), {}, None)


def commit_window_call(
    state: Tensor, rows: Tensor, entries: Tensor, path: Tensor
) -> KernelCall[None]:
    """Advance the windows ``state`` T [L, E, W - 1, C] in place; see ``COMMIT_WINDOW``.

    Raises:
        ValueError: a tensor does not fit; the message names it.
    """
    tensors = dict(zip(COMMIT_WINDOW.tensors, (state, rows, entries, path), strict=True))
    return KernelCall(COMMIT_WINDOW, tensors, {}, None)
