"""Recurrent layers on CUDA: our kernels, and stock operations where there is none for the sizes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trt_eagle3.engine.torch import capi
from trt_eagle3.graph.ops.gated_delta import gated_delta as stock_gated_delta
from trt_eagle3.graph.ops.gated_delta import replay_delta, replay_window

__all__ = ["commit_delta", "commit_window", "gated_delta"]


def gated_delta(
    *inputs: Tensor, num_k_heads: int, num_v_heads: int, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The op (``graph/ops/gated_delta.py``) on CUDA."""
    settings: dict[str, Any] = {"num_k_heads": num_k_heads, "num_v_heads": num_v_heads}
    settings["epsilon"] = epsilon
    try:
        return capi.gated_delta(*inputs, **settings)
    except NotImplementedError:  # heads wider than 128, say
        return stock_gated_delta(*inputs, **settings)


def commit_delta(state: Tensor, rows: Tensor, entries: Tensor, path: Tensor) -> None:
    """Bring the matrices at ``entries`` int32 [n] of ``state`` float32 [L, E, Hv, Dk, Dv] further,
    in place, along ``path`` int32 [n, K] of ``rows`` float32 [L, n, T, ...], negative behind the
    last.
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
    """``commit_delta`` of windows T [L, E, W - 1, C] and rows T [L, n, T, C]."""
    if _has_kernels(state):
        return capi.commit_window(state, rows, entries, path)
    taken, counts = _taken(rows, path)
    state[:, entries.long()] = replay_window(state[:, entries.long()], taken, counts)
    return None


def _has_kernels(state: Tensor) -> bool:
    return state.device.type == "cuda" and capi.available()


def _taken(rows: Tensor, path: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ``path`` of each sequence, and how many of them count."""
    index = path.clamp(min=0).long()[None, :, :, None]
    taken = rows.gather(2, index.expand(len(rows), -1, -1, rows.shape[3]))
    return taken, (path >= 0).sum(1)
