"""``FusedMoe`` on CUDA: a mixture of experts whose weights are dense, FP8 or INT4.

Up to 64 rows one kernel of ours reads the experts that any row goes through, each once. More rows,
as of prompts, are gathered by expert on the device and go through stock grouped products, quantised
experts dequantised for the call, or, where FP8 activations were asked for and each row of a weight
has one scale, with the rows in FP8. Nothing waits for the device: all of it may be captured.

Shapes: n rows, H hidden, E experts, I inner width, k experts of a row. T is float16 or bfloat16.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.engine.torch import capi
from trt_eagle3.graph.ops.fused_moe import fused_moe as stock_fused_moe

__all__ = ["DenseExperts", "Experts", "Fp8Experts", "Int4Experts", "fused_moe"]

_GROUPED_CHIP = (9, 0)  # where torch has grouped products


class Experts(ABC):
    """Weights [E, N, K] of all experts, kept in one form."""

    @abstractmethod
    def few(
        self, down: Experts, x: Tensor, router_logits: Tensor, top_k: int, renormalise: int
    ) -> Tensor:
        """The mixture of at most 64 rows, with these as gate_up.

        Raises:
            NotImplementedError: no kernel computes it.
        """

    @abstractmethod
    def dense(self, dtype: torch.dtype) -> Tensor:
        """T [E, N, K]."""

    def grouped(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Rows up to ``ends[e]`` times expert e's weight: T [rows, N]."""
        weight = self.dense(rows.dtype).transpose(1, 2)
        return torch._grouped_mm(rows, weight, offs=ends)


@dataclass(frozen=True, eq=False)
class DenseExperts(Experts):
    """``weight``: T [E, N, K]."""

    weight: Tensor

    def few(
        self, down: Experts, x: Tensor, router_logits: Tensor, top_k: int, renormalise: int
    ) -> Tensor:
        """``Experts.few``."""
        assert isinstance(down, DenseExperts), type(down)
        weights = (self.weight, down.weight)
        return capi.fused_moe(x, router_logits, *weights, top_k=top_k, renormalise=renormalise)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """``Experts.dense``."""
        return self.weight.to(dtype)


@dataclass(frozen=True, eq=False)
class Fp8Experts(Experts):
    """``codes``: float8_e4m3fn [E, N, K], packed. ``scale``: float32 [E, N, 1 or K / 128] or
    [E, N / 128, K / 128]. ``fp8_activations``: whether many rows are multiplied in FP8.
    """

    codes: Tensor
    scale: Tensor
    fp8_activations: bool = False

    def few(
        self, down: Experts, x: Tensor, router_logits: Tensor, top_k: int, renormalise: int
    ) -> Tensor:
        """``Experts.few``."""
        assert isinstance(down, Fp8Experts), type(down)
        weights = ((self.codes, self.scale), (down.codes, down.scale))
        return capi.fused_moe_fp8(x, router_logits, *weights, top_k=top_k, renormalise=renormalise)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """``Experts.dense``."""
        values = capi.unpack_fp8(self.codes.flatten(0, 1), self.scale.flatten(0, 1), dtype)
        return values.view(self.codes.shape)

    def grouped(self, rows: Tensor, ends: Tensor) -> Tensor:
        """``Experts.grouped``."""
        by_row = self.scale.shape[1:] == (self.codes.shape[1], 1)
        if not (self.fp8_activations and by_row and rows.dtype == torch.bfloat16):
            return super().grouped(rows, ends)
        q, scale = capi.quantise_rows(rows)
        weight, scales = self.codes.transpose(1, 2), self.scale[..., 0]
        return torch._scaled_grouped_mm(
            q, weight, scale[0], scales, offs=ends, out_dtype=rows.dtype, use_fast_accum=True
        )


@dataclass(frozen=True, eq=False)
class Int4Experts(Experts):
    """``codes``: int32 [E, N, K / 8], packed; ``scale``: 16-bit [E, N, K / group];
    ``zero_point``: uint8 of scale's shape; None is 8 for all.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None

    def few(
        self, down: Experts, x: Tensor, router_logits: Tensor, top_k: int, renormalise: int
    ) -> Tensor:
        """``Experts.few``."""
        assert isinstance(down, Int4Experts), type(down)
        weights = (
            (self.codes, self.scale, self.zero_point),
            (down.codes, down.scale, down.zero_point),
        )
        return capi.fused_moe_int4(x, router_logits, *weights, top_k=top_k, renormalise=renormalise)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """``Experts.dense``."""
        experts, outer, words = self.codes.shape
        zeros = None if self.zero_point is None else self.zero_point.flatten(0, 1)
        parts = (self.codes.flatten(0, 1), self.scale.flatten(0, 1), zeros)
        return capi.unpack_int4(*parts, dtype).view(experts, outer, words * 8)


def fused_moe(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Experts | Tensor,
    down: Experts | Tensor,
    *,
    top_k: int,
    renormalise: int,
) -> Tensor:
    """The op (``graph/ops/fused_moe.py``) on CUDA; weights as a tensor are dense.

    A row's bits do not depend on how many others there are up to 64, nor on which.
    """
    up = DenseExperts(gate_up) if isinstance(gate_up, Tensor) else gate_up
    low = DenseExperts(down) if isinstance(down, Tensor) else down
    most = capi.MAX_MOE_ROWS
    try:
        if len(x) <= most:
            return up.few(low, x, router_logits, top_k, renormalise)
        if _grouped_products(x):
            return _many(x, router_logits, up, low, top_k, renormalise)
        parts = zip(x.split(most), router_logits.split(most), strict=True)
        return torch.cat([up.few(low, *part, top_k, renormalise) for part in parts])
    except NotImplementedError:  # float32, or more experts than fit
        weights = (up.dense(x.dtype), low.dense(x.dtype))
        return stock_fused_moe(x, router_logits, *weights, top_k=top_k, renormalise=renormalise)


def _grouped_products(x: Tensor) -> bool:
    capability = torch.cuda.get_device_capability(x.device)
    return x.dtype == torch.bfloat16 and capability == _GROUPED_CHIP


def _many(
    x: Tensor, router_logits: Tensor, gate_up: Experts, down: Experts, top_k: int, renormalise: int
) -> Tensor:
    """With rows gathered by expert."""
    experts, shares, places, counts = capi.route_rows(
        router_logits, top_k=top_k, renormalise=renormalise
    )
    rows, positions, ends = capi.gather_rows(x, experts, places, counts)
    inner = capi.silu_mul(gate_up.grouped(rows, ends))
    return capi.combine_rows(down.grouped(inner, ends), positions, shares)
