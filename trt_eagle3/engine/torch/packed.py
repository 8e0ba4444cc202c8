"""Quantised weights that the torch session multiplies as stored, on CUDA.

With 16-bit activations, our kernels read the quantised numbers once for up to 128 rows, and once
more for each 128 rows up to 384. Each product equals that of the dequantised weight, summed in
float32. For more rows, as in prompts, the weight is dequantised for the call. That costs little
compared with such a product.

``engine.activations`` may be FP8 (which also needs an FP8 checkpoint with FP8 activations) or
int8. Then each row is rounded by itself, or by 128 columns if the scales change along K. This does
not depend on the number of rows, so neither does a row's result. On Hopper, bytes are multiplied by
bytes (``linear_w8a8``; stock products for many FP8 rows). Up to 8 rows, and few rows on other
chips, are rounded to the same FP8 values and multiplied in 16 bits.

Shapes: n rows of x, K inputs, N outputs. T is the compute type, float16 or bfloat16.
"""

from __future__ import annotations

import contextlib
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from trt_eagle3.engine import capi
from trt_eagle3.engine.torch.product_rows import ProductRows, TensorRows

__all__ = [
    "Fp8Weight",
    "Int4Weight",
    "Int8Weight",
    "Nvfp4Weight",
    "PackedWeight",
    "warn_of_unrounded",
]

_FEW_ROWS = 3 * capi.MAX_PACKED_ROWS
"""Up to this number of rows, repeated kernel calls are faster than dequantising the weight."""
_ROUNDED_ROWS, _BYTE_ROWS = 8, 128
"""Above the first and up to the second number of rows, our products of FP8 bytes are the fastest.
Fewer rows are rounded and multiplied in 16 bits. More rows use stock products.
"""
_BLOCK = 128  # rows of an FP8 block scale
_STOCK_ROWS = 16  # stock products with block scales need a multiple of this
_FP8_CHIP, _HOPPER = (8, 9), 9


@dataclass(frozen=True, eq=False)
class PackedWeight(ABC):
    """A weight [N, K] that stays quantised: ``codes`` has N rows."""

    codes: Tensor

    def linear(self, x: Tensor) -> Tensor:
        """Return ``x [n, K] @ weight.T``: T [n, N]."""
        return self.product(TensorRows(x))

    def product(self, rows: ProductRows) -> Tensor:
        """Compute ``linear`` of rows that may be made for this product alone."""
        return self._of_values(rows.values())

    @property
    def takes_bytes(self) -> bool:
        """Whether ``product`` may take rows in eight bits."""
        return False

    @abstractmethod
    def _few(self, x: Tensor, out: Tensor) -> Tensor:
        """Compute ``out = linear(x)`` of at most ``MAX_PACKED_ROWS`` rows, with our kernels."""

    @abstractmethod
    def _unpacked(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantised weight [N, K]."""

    def _of_values(self, x: Tensor) -> Tensor:
        """Compute ``linear`` with 16-bit activations."""
        if len(x) <= _FEW_ROWS:
            out = x.new_empty(len(x), len(self.codes))
            with contextlib.suppress(NotImplementedError):  # before Hopper
                size = capi.MAX_PACKED_ROWS
                for part, part_out in zip(x.split(size), out.split(size), strict=True):
                    self._few(part, part_out)
                return out
        return functional.linear(x, self._unpacked(x.dtype))


@dataclass(frozen=True, eq=False)
class Fp8Weight(PackedWeight):
    """A weight in FP8.

    ``codes``: float8_e4m3fn [N, K], packed. ``scale``: float32 [N, 1], or with K / 128 columns and
    N or ceil(N / 128) rows. ``fp8_activations``: whether rows are rounded to FP8, each by itself.
    Rounding needs a chip with FP8 products, and bfloat16 as T.
    """

    scale: Tensor
    fp8_activations: bool = False

    def product(self, rows: ProductRows) -> Tensor:
        """Compute the product; see ``PackedWeight.product``."""
        if not self._rounds(rows.dtype):
            return self._of_values(rows.values())
        by_bytes = not self._blocks and _on_hopper()
        if by_bytes and _ROUNDED_ROWS < len(rows) <= _BYTE_ROWS:
            return _of_bytes(rows.codes(), self.codes, self.scale, rows.dtype)
        if len(rows) <= capi.MAX_PACKED_ROWS:
            return self._of_values(rows.rounded(blocks=self._blocks))
        return self._stock(rows)

    @property
    def takes_bytes(self) -> bool:
        """Whether rows may be rounded; see ``PackedWeight.takes_bytes``."""
        return self._rounds(torch.bfloat16)

    @property
    def _blocks(self) -> bool:
        """Whether the scales change along K."""
        return self.scale.shape[1] > 1

    def _rounds(self, dtype: torch.dtype) -> bool:
        """Whether rows are rounded to FP8; independent of the number of rows."""
        stock = not self._blocks or len(self.scale) * _BLOCK == len(self.codes)
        known = self.fp8_activations and stock and dtype == torch.bfloat16
        return known and _capability() >= _FP8_CHIP

    def _stock(self, rows: ProductRows) -> Tensor:
        """Compute the product with stock FP8 operations."""
        padding = -len(rows) % _STOCK_ROWS if self._blocks else 0
        if padding:
            padded = functional.pad(rows.values(), (0, 0, 0, padding))
            return self._stock(TensorRows(padded))[: len(rows)]
        q, scale = rows.codes(blocks=self._blocks)
        # fast: the chip adds in about 14 bits (docs/measurements.md); FP8 rounding loses far more
        fast = not self._blocks
        return torch._scaled_mm(
            q, self.codes.T, scale.T, self.scale.T, out_dtype=rows.dtype, use_fast_accum=fast
        )

    def _few(self, x: Tensor, out: Tensor) -> Tensor:
        return capi.linear_fp8(x, self.codes, self.scale, prefetch_safe=True, out=out)

    def _unpacked(self, dtype: torch.dtype) -> Tensor:
        return capi.unpack_fp8(self.codes, self.scale, dtype)


@dataclass(frozen=True, eq=False)
class Int8Weight(PackedWeight):
    """A weight in INT8.

    ``codes``: uint8 [N, K], packed, of the numbers + 128. ``scale``: as in ``Fp8Weight``.
    ``int8_activations``: whether rows are rounded to int8, each by itself. Rounding needs a scale
    for each row of the weight, and a Hopper chip. Integers are summed exactly.
    """

    scale: Tensor
    int8_activations: bool = False

    def product(self, rows: ProductRows) -> Tensor:
        """Compute the product; see ``PackedWeight.product``."""
        if not self.takes_bytes:
            return self._of_values(rows.values())
        return _of_bytes(rows.codes(integers=True), self.codes, self.scale, rows.dtype)

    @property
    def takes_bytes(self) -> bool:
        """Whether rows are rounded; see ``PackedWeight.takes_bytes``."""
        return self.int8_activations and self.scale.shape[1] == 1 and _on_hopper()

    def _few(self, x: Tensor, out: Tensor) -> Tensor:
        return capi.linear_int8(x, self.codes, self.scale, prefetch_safe=True, out=out)

    def _unpacked(self, dtype: torch.dtype) -> Tensor:
        return capi.unpack_int8(self.codes, self.scale, dtype)


@dataclass(frozen=True, eq=False)
class Int4Weight(PackedWeight):
    """A weight in INT4: ``codes``, ``scale``, ``zero_point`` as in ``capi.linear_int4``."""

    scale: Tensor
    zero_point: Tensor | None

    def _few(self, x: Tensor, out: Tensor) -> Tensor:
        stored = (self.codes, self.scale, self.zero_point)
        return capi.linear_int4(x, *stored, prefetch_safe=True, out=out)

    def _unpacked(self, dtype: torch.dtype) -> Tensor:
        return capi.unpack_int4(self.codes, self.scale, self.zero_point, dtype)


@dataclass(frozen=True, eq=False)
class Nvfp4Weight(PackedWeight):
    """A weight in NVFP4: ``codes``, ``scale``, ``row_scale`` as in ``capi.linear_nvfp4``."""

    scale: Tensor
    row_scale: Tensor

    def _few(self, x: Tensor, out: Tensor) -> Tensor:
        stored = (self.codes, self.scale, self.row_scale)
        return capi.linear_nvfp4(x, *stored, prefetch_safe=True, out=out)

    def _unpacked(self, dtype: torch.dtype) -> Tensor:
        return capi.unpack_nvfp4(self.codes, self.scale, self.row_scale, dtype)


def _of_bytes(rows: capi.RowCodes, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the product of rows and a weight, both in eight bits."""
    return capi.linear_w8a8(*rows, codes, scale, dtype, prefetch_safe=True)


@cache
def _capability() -> tuple[int, int]:
    """Return the capability of this process's chip; (0, 0) without CUDA."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def _on_hopper() -> bool:
    return _capability()[0] == _HOPPER


def warn_of_unrounded(activations: str) -> None:
    """Warn if ``engine.activations`` needs products of bytes that this chip does not have."""
    has = {"fp8": _capability() >= _FP8_CHIP, "int8": _on_hopper()}
    if not has.get(activations, True):
        chip = "sm{}{}".format(*_capability())
        warnings.warn(
            f"engine.activations: {activations}: this GPU ({chip}) multiplies "
            "with such weights in 16 bits, so activations are not rounded. Answers are those of "
            "activations: compute.",
            stacklevel=2,
        )
