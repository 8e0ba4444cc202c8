"""Recurrent layers on CUDA: our kernels, or stock operations for sizes without a kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trt_eagle3.engine import capi
from trt_eagle3.graph.ops.gated_delta import gated_delta as stock_gated_delta

__all__ = ["gated_delta"]


def gated_delta(
    *inputs: Tensor, num_k_heads: int, num_v_heads: int, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the op (``graph/ops/gated_delta.py``) on CUDA."""
    settings: dict[str, Any] = {"num_k_heads": num_k_heads, "num_v_heads": num_v_heads}
    settings["epsilon"] = epsilon
    try:
        return capi.gated_delta(*inputs, **settings)
    except NotImplementedError:  # for example, heads wider than 128
        return stock_gated_delta(*inputs, **settings)
