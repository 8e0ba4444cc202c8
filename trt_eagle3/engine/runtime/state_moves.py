"""Updates of layer states outside a graph: by our kernels on CUDA, else by torch operations.

Shapes: L layers, E entries, n sequences, T rows of a forward, at most K accepted rows; Hv value
heads of width Dv, keys of width Dk; W the convolution's width, C its channels.
"""

from __future__ import annotations

from torch import Tensor

from trt_eagle3.engine import capi
from trt_eagle3.graph.ops.gated_delta import replay_delta, replay_window

__all__ = ["commit_delta", "commit_window", "move_rows"]


def move_rows(buffer: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copy the rows at slots ``source`` (int64) of ``buffer [states, slots, *shape]`` to slots
    ``destination``, in every state.

    All rows are read before any is written.
    """
    by_kernel = buffer.is_cuda and buffer.ndim == 4 and len(source) <= capi.MAX_KV_MOVES
    if by_kernel and capi.available():
        capi.kv_move(buffer, source, destination)
        return
    source, destination = (
        slots.to(buffer.device, non_blocking=True) for slots in (source, destination)
    )
    buffer[:, destination] = buffer[:, source]


def commit_delta(state: Tensor, rows: Tensor, entries: Tensor, path: Tensor) -> None:
    """Advance the matrices at ``entries`` int32 [n] of ``state`` float32 [L, E, Hv, Dk, Dv], in
    place, along ``path`` int32 [n, K] of ``rows`` float32 [L, n, T, ...].

    Entries of ``path`` after its last row are negative.
    """
    if _has_kernels(state):
        try:
            return capi.commit_delta(state, rows, entries, path)
        except NotImplementedError:
            pass
    taken, counts = _taken(rows, path)
    state[:, entries.long()] = replay_delta(state[:, entries.long()], taken, counts)
    return None


def commit_window(state: Tensor, rows: Tensor, entries: Tensor, path: Tensor) -> None:
    """Advance windows T [L, E, W - 1, C] by rows T [L, n, T, C], as ``commit_delta`` does."""
    if _has_kernels(state):
        return capi.commit_window(state, rows, entries, path)
    taken, counts = _taken(rows, path)
    state[:, entries.long()] = replay_window(state[:, entries.long()], taken, counts)
    return None


def _has_kernels(state: Tensor) -> bool:
    return state.device.type == "cuda" and capi.available()


def _taken(rows: Tensor, path: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows ``path`` of each sequence, and how many of them are valid."""
    index = path.clamp(min=0).long()[None, :, :, None]
    taken = rows.gather(2, index.expand(len(rows), -1, -1, rows.shape[3]))
    return taken, (path >= 0).sum(1)
