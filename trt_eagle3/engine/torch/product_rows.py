"""Rows that a product multiplies: existing ones, or ones that are made for it alone.

A product with a quantised weight may need rows in eight bits. If SiluMul or AddRmsNorm make them,
one kernel computes the bytes directly, and the 16-bit values are never written.

Shapes: n rows, K columns. T is the compute type.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from trt_eagle3.engine import capi

__all__ = ["NormRows", "ProductRows", "SiluMulRows", "TensorRows"]


class ProductRows(Protocol):
    """Rows ``x [n, K]`` of a product. Call only one of ``values``, ``codes``, ``rounded``, once."""

    def __len__(self) -> int:
        """Return n."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The type T."""
        ...

    def values(self) -> Tensor:
        """Return the rows, T [n, K]."""
        ...

    def codes(self, *, blocks: bool = False, integers: bool = False) -> capi.RowCodes:
        """Return the rows in eight bits; see ``capi.quantise_rows``."""
        ...

    def rounded(self, *, blocks: bool = False) -> Tensor:
        """Return the values of FP8 codes, T [n, K]; see ``capi.round_rows``."""
        ...


class TensorRows:
    """Implements ``ProductRows`` for the rows of a tensor."""

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self.dtype = x.dtype

    def __len__(self) -> int:
        return len(self._x)

    def values(self) -> Tensor:
        """Return the tensor."""
        return self._x

    def codes(self, *, blocks: bool = False, integers: bool = False) -> capi.RowCodes:
        """Return the rows in eight bits; see ``ProductRows.codes``."""
        return capi.quantise_rows(self._x, blocks=blocks, integers=integers)

    def rounded(self, *, blocks: bool = False) -> Tensor:
        """Return the rounded rows; see ``ProductRows.rounded``."""
        return capi.round_rows(self._x, blocks=blocks)


class SiluMulRows:
    """Implements ``ProductRows`` for ``silu(gate) * up`` of ``gate_up`` [n, 2 K]."""

    def __init__(self, gate_up: Tensor) -> None:
        self._gate_up = gate_up
        self.dtype = gate_up.dtype

    def __len__(self) -> int:
        return len(self._gate_up)

    def values(self) -> Tensor:
        """Compute ``SiluMul``."""
        return capi.silu_mul(self._gate_up)

    def codes(self, *, blocks: bool = False, integers: bool = False) -> capi.RowCodes:
        """Return the rows in eight bits; see ``ProductRows.codes``."""
        return capi.quantise_silu_mul(self._gate_up, blocks=blocks, integers=integers)

    def rounded(self, *, blocks: bool = False) -> Tensor:
        """Return the rounded rows; see ``ProductRows.rounded``."""
        return capi.round_silu_mul(self._gate_up, blocks=blocks)


class NormRows:
    """Implements ``ProductRows`` for the output of ``AddRmsNorm``. Afterwards ``total`` is
    x + residual, or None without a residual.
    """

    def __init__(
        self, x: Tensor, weight: Tensor, residual: Tensor | None, *, epsilon: float
    ) -> None:
        self._x, self._residual, self._epsilon = x, residual, epsilon
        self._inputs = (x, weight, residual)
        self.dtype = weight.dtype
        self.total: Tensor | None = None

    def __len__(self) -> int:
        return len(self._x)

    @property
    def _is_fused(self) -> bool:
        """Whether the quantising kernels also compute this norm."""
        stream = self._x if self._residual is None else self._residual
        return stream.dtype == self.dtype and stream.shape[1] <= capi.MAX_QUANTISED_NORM

    def values(self) -> Tensor:
        """Compute ``AddRmsNorm``."""
        y, self.total = capi.add_rms_norm(*self._inputs, epsilon=self._epsilon)
        return y

    def codes(self, *, blocks: bool = False, integers: bool = False) -> capi.RowCodes:
        """Return the rows in eight bits; see ``ProductRows.codes``."""
        if not self._is_fused:
            return TensorRows(self.values()).codes(blocks=blocks, integers=integers)
        codes, self.total = capi.quantise_add_rms_norm(
            *self._inputs, epsilon=self._epsilon, blocks=blocks, integers=integers
        )
        return codes

    def rounded(self, *, blocks: bool = False) -> Tensor:
        """Return the rounded rows; see ``ProductRows.rounded``."""
        if not self._is_fused:
            return TensorRows(self.values()).rounded(blocks=blocks)
        y, self.total = capi.round_add_rms_norm(*self._inputs, epsilon=self._epsilon, blocks=blocks)
        return y
