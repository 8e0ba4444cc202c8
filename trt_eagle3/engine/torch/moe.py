"""``FusedMoe`` on CUDA: a mixture of experts whose weights are dense, FP8 or INT4.

Our kernels read each expert that receives a row. Up to 64 rows take as long as this reading. More
rows, as in prompts, are gathered by expert. If FP8 activations are configured and each row of a
weight has one scale, prompt rows are in FP8 and use stock grouped products. Sizes that no kernel
takes use stock operations. No operation waits for the device, so all can be captured.

Shapes: n rows, H hidden, E experts, I inner width, k experts of a row. T is float16 or bfloat16.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

from trt_eagle3.engine import capi
from trt_eagle3.engine.torch.pack import pack
from trt_eagle3.engine.torch.packed import Fp8Weight, Int4Weight, PackedWeight
from trt_eagle3.graph.ops.fused_moe import fused_moe as stock_fused_moe
from trt_eagle3.graph.weights import WeightExpr

__all__ = [
    "DenseExperts",
    "Experts",
    "Fp8Experts",
    "Int4Experts",
    "as_experts",
    "fused_moe",
    "pack_experts",
]

_GROUPED_CHIP = (9, 0)  # torch has grouped products only there


class Experts(ABC):
    """Weights [E, N, K] of all experts, stored in one form."""

    @abstractmethod
    def mixture(
        self, down: Experts, x: Tensor, router_logits: Tensor, top_k: int, renormalise: int
    ) -> Tensor:
        """Compute the mixture with our kernels; ``self`` is gate_up.

        Raises:
            NotImplementedError: no kernel computes it for this number of rows.
        """

    @abstractmethod
    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weights T [E, N, K], dequantised."""


@dataclass(frozen=True, eq=False)
class DenseExperts(Experts):
    """``weight``: T [E, N, K]."""

    weight: Tensor

    def mixture(
        self, down: Experts, x: Tensor, router_logits: Tensor, top_k: int, renormalise: int
    ) -> Tensor:
        """Compute the mixture; see ``Experts.mixture``."""
        assert isinstance(down, DenseExperts), type(down)
        weights = (self.weight, down.weight)
        return capi.fused_moe(x, router_logits, *weights, top_k=top_k, renormalise=renormalise)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weights; see ``Experts.dense``."""
        return self.weight.to(dtype)


@dataclass(frozen=True, eq=False)
class Fp8Experts(Experts):
    """Experts in FP8.

    ``codes``: float8_e4m3fn [E, N, K], packed. ``scale``: float32 [E, N or 1, 1 or K / 128] or
    [E, N / 128, K / 128]. ``fp8_activations``: whether many rows are multiplied in FP8.
    """

    codes: Tensor
    scale: Tensor
    fp8_activations: bool = False

    def mixture(
        self, down: Experts, x: Tensor, router_logits: Tensor, top_k: int, renormalise: int
    ) -> Tensor:
        """Compute the mixture; see ``Experts.mixture``."""
        assert isinstance(down, Fp8Experts), type(down)
        weights = ((self.codes, self.scale), (down.codes, down.scale))
        return capi.fused_moe_fp8(x, router_logits, *weights, top_k=top_k, renormalise=renormalise)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weights; see ``Experts.dense``."""
        scale = self.scale
        if scale.shape[1] == 1:  # one scale for an expert: repeat it for its rows
            scale = scale.expand(-1, self.codes.shape[1], -1)
        values = capi.unpack_fp8(self.codes.flatten(0, 1), scale.flatten(0, 1), dtype)
        return values.view(self.codes.shape)

    @property
    def multiplies_in_fp8(self) -> bool:
        """Whether prompt rows are also in FP8."""
        return self.fp8_activations and self.scale.shape[1:] == (self.codes.shape[1], 1)

    def times(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Multiply rows in FP8; those up to ``ends[e]`` by expert e's weight: T [rows, N]."""
        q, scale = capi.quantise_rows(rows)
        weight, scales = self.codes.transpose(1, 2), self.scale[..., 0]
        return torch._scaled_grouped_mm(
            q, weight, scale[0], scales, offs=ends, out_dtype=rows.dtype, use_fast_accum=True
        )


@dataclass(frozen=True, eq=False)
class Int4Experts(Experts):
    """Experts in INT4.

    ``codes``: int32 [E, N, K / 8], packed; ``scale``: 16-bit [E, N, K / group];
    ``zero_point``: uint8 of scale's shape; None is 8 for all.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None

    @property
    def _form(self) -> tuple[torch.dtype, int, bool]:
        group = self.codes.shape[2] * 8 // self.scale.shape[2]
        return self.scale.dtype, group, self.zero_point is None

    def is_like(self, other: object) -> bool:
        """Return whether one call takes both: same type of scales, group size and zero points."""
        return isinstance(other, Int4Experts) and self._form == other._form

    def mixture(
        self, down: Experts, x: Tensor, router_logits: Tensor, top_k: int, renormalise: int
    ) -> Tensor:
        """Compute the mixture; see ``Experts.mixture``."""
        assert isinstance(down, Int4Experts), type(down)
        weights = (
            (self.codes, self.scale, self.zero_point),
            (down.codes, down.scale, down.zero_point),
        )
        return capi.fused_moe_int4(x, router_logits, *weights, top_k=top_k, renormalise=renormalise)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weights; see ``Experts.dense``."""
        experts, outer, words = self.codes.shape
        zeros = None if self.zero_point is None else self.zero_point.flatten(0, 1)
        parts = (self.codes.flatten(0, 1), self.scale.flatten(0, 1), zeros)
        return capi.unpack_int4(*parts, dtype).view(experts, outer, words * 8)


def pack_experts(
    exprs: tuple[WeightExpr, WeightExpr],
    root: Path,
    device: torch.device,
    *,
    activations: str = "compute",
) -> tuple[Experts, Experts] | None:
    """Pack a layer's gate_up and down on ``device``; None if the kernels do not support the form of
    either.

    Raises:
        UserError: a file cannot be read, or is cut short.
    """
    aligned = all(n % capi.PACKED_COLUMNS == 0 for expr in exprs for n in expr.shape[1:])
    if not aligned or exprs[0].shape[0] > capi.MAX_EXPERTS:
        return None
    gate_up, down = (_packed(expr, root, device, activations=activations) for expr in exprs)
    if gate_up is None or type(gate_up) is not type(down):
        return None
    if isinstance(gate_up, Int4Experts) and not gate_up.is_like(down):
        return None
    return gate_up, down


def _packed(
    expr: WeightExpr, root: Path, device: torch.device, *, activations: str
) -> Experts | None:
    """Pack the experts of ``expr``, whose shape is [E, N, K]; N and K are multiples of 128."""
    packed = pack(replace(expr, experts=0), root, device, activations=activations)
    return None if packed is None else as_experts(packed, expr.experts)


def as_experts(packed: PackedWeight, experts: int) -> Experts | None:
    """Return the stacked matrices [N, K] of ``packed`` as ``experts`` experts; None if no kernel
    multiplies experts of this form. N must be a multiple of 128.
    """
    if isinstance(packed, Fp8Weight):
        rows, columns = packed.codes.shape
        scale = packed.scale.view(experts, -1, packed.scale.shape[1])
        codes = packed.codes.view(experts, rows // experts, columns)
        return Fp8Experts(codes, scale, packed.fp8_activations)
    if isinstance(packed, Int4Weight):
        shape = (experts, len(packed.codes) // experts, -1)
        zeros = None if packed.zero_point is None else packed.zero_point.view(shape)
        return Int4Experts(packed.codes.view(shape), packed.scale.view(shape), zeros)
    return None


def fused_moe(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Experts | Tensor,
    down: Experts | Tensor,
    *,
    top_k: int,
    renormalise: int,
) -> Tensor:
    """Compute the op (``graph/ops/fused_moe.py``) on CUDA; weights given as a tensor are dense.

    A row's bits do not depend on other rows, nor on the number of rows up to 64. With packed
    experts, this holds within 1 to 8 rows and within 9 to 64.
    """
    up = DenseExperts(gate_up) if isinstance(gate_up, Tensor) else gate_up
    low = DenseExperts(down) if isinstance(down, Tensor) else down
    if _known(up, top_k):
        with suppress(NotImplementedError):  # float32, or more experts than fit
            return _by_kernels(x, router_logits, up, low, top_k, renormalise)
    weights = (up.dense(x.dtype), low.dense(x.dtype))
    return stock_fused_moe(x, router_logits, *weights, top_k=top_k, renormalise=renormalise)


def _known(gate_up: Experts, top_k: int) -> bool:
    """Whether the kernels take experts of these sizes; ``pack_experts`` has checked packed ones."""
    if top_k > capi.MAX_TOP_K:
        return False
    if not isinstance(gate_up, DenseExperts):
        return True
    experts, outer, hidden = gate_up.weight.shape
    columns, width_columns = capi.DENSE_EXPERT_COLUMNS
    aligned = hidden % columns == 0 and outer // 2 % width_columns == 0
    return aligned and experts <= capi.MAX_EXPERTS


def _by_kernels(
    x: Tensor, router_logits: Tensor, gate_up: Experts, down: Experts, top_k: int, renormalise: int
) -> Tensor:
    most = capi.MAX_FEW_MOE_ROWS
    if len(x) > most:
        if _is_in_fp8(gate_up, x) and _is_in_fp8(down, x):
            return _many_in_fp8(x, router_logits, gate_up, down, top_k, renormalise)
        with suppress(NotImplementedError):  # another chip, or other sizes
            return gate_up.mixture(down, x, router_logits, top_k, renormalise)
    parts = zip(x.split(most), router_logits.split(most), strict=True)
    found = [gate_up.mixture(down, *part, top_k, renormalise) for part in parts]
    return found[0] if len(found) == 1 else torch.cat(found)


def _is_in_fp8(experts: Experts, x: Tensor) -> TypeGuard[Fp8Experts]:
    """Whether many rows of ``x`` are multiplied in FP8."""
    if not isinstance(experts, Fp8Experts) or not experts.multiplies_in_fp8:
        return False
    capability = torch.cuda.get_device_capability(x.device)
    return x.dtype == torch.bfloat16 and capability == _GROUPED_CHIP


def _many_in_fp8(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Fp8Experts,
    down: Fp8Experts,
    top_k: int,
    renormalise: int,
) -> Tensor:
    """Compute the mixture with rows that are gathered by expert and rounded to FP8."""
    experts, shares, places, counts = capi.route_rows(
        router_logits, top_k=top_k, renormalise=renormalise
    )
    rows, positions, ends = capi.gather_rows(x, experts, places, counts)
    inner = capi.silu_mul(gate_up.times(rows, ends))
    return capi.combine_rows(down.times(inner, ends), positions, shares)
