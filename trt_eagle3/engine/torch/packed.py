"""Quantised weights that the torch session multiplies with as they are, on CUDA.

With 16-bit activations our kernels read the quantised numbers once for up to 128 rows, in passes of
128 up to 384, and each product is that of the dequantised weight, summed in float32. More rows, as
of prompts, meet the weight dequantised for the call: little beside such a product.

Where ``engine.activations`` says that activations are FP8 (and an FP8 checkpoint says so too) or
int8, rows are rounded, each by itself (by 128 columns where the scales change along K), whatever
their number: what a row gives does not depend on how many there are. On Hopper bytes are then
multiplied by bytes (``linear_w8a8``; many rows of FP8 by stock products); up to 8 rows, and few
rows elsewhere, are rounded to the same FP8 values and multiplied in 16 bits.

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
"""Up to which passes of the kernels are faster than a weight dequantised for the call."""
_ROUNDED_ROWS, _BYTE_ROWS = 8, 128
"""From the first to the second our products of FP8 bytes are the fastest: fewer rows are rounded
and multiplied in 16 bits, more are for stock products.
"""
_BLOCK = 128  # rows of an FP8 scale of blocks
_STOCK_ROWS = 16  # stock products with scales of blocks take multiples
_FP8_CHIP, _HOPPER = (8, 9), 9


@dataclass(frozen=True, eq=False)
class PackedWeight(ABC):
    """A weight [N, K] that is kept quantised: ``codes`` has N rows."""

    codes: Tensor

    def linear(self, x: Tensor) -> Tensor:
        """``x [n, K] @ weight.T``: T [n, N]."""
        return self.product(TensorRows(x))

    def product(self, rows: ProductRows) -> Tensor:
        """``linear`` of rows that may be made for this product alone."""
        return self._of_values(rows.values())

    @property
    def takes_bytes(self) -> bool:
        """Whether ``product`` may ask for rows in eight bits."""
        return False

    @abstractmethod
    def _few(self, x: Tensor, out: Tensor) -> Tensor:
        """``out = linear(x)`` of at most ``MAX_PACKED_ROWS`` rows, by our kernels."""

    @abstractmethod
    def _unpacked(self, dtype: torch.dtype) -> Tensor:
        """The dequantised weight [N, K]."""

    def _of_values(self, x: Tensor) -> Tensor:
        """``linear`` with 16-bit activations."""
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
    """``codes``: float8_e4m3fn [N, K], packed. ``scale``: float32 [N, 1], or with K / 128 columns
    and N or ceil(N / 128) rows. ``fp8_activations``: whether rows are rounded to FP8, each by
    itself, where the chip multiplies FP8 and T is bfloat16.
    """

    scale: Tensor
    fp8_activations: bool = False

    def product(self, rows: ProductRows) -> Tensor:
        """``PackedWeight.product``."""
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
        """``PackedWeight.takes_bytes``."""
        return self._rounds(torch.bfloat16)

    @property
    def _blocks(self) -> bool:
        """Whether the scales change along K."""
        return self.scale.shape[1] > 1

    def _rounds(self, dtype: torch.dtype) -> bool:
        """Whether rows are rounded to FP8: never of one number of rows alone."""
        stock = not self._blocks or len(self.scale) * _BLOCK == len(self.codes)
        known = self.fp8_activations and stock and dtype == torch.bfloat16
        return known and _capability() >= _FP8_CHIP

    def _stock(self, rows: ProductRows) -> Tensor:
        """By stock FP8 products."""
        padding = -len(rows) % _STOCK_ROWS if self._blocks else 0
        if padding:
            padded = functional.pad(rows.values(), (0, 0, 0, padding))
            return self._stock(TensorRows(padded))[: len(rows)]
        q, scale = rows.codes(blocks=self._blocks)
        # Adds as the chip does, in about 14 bits (docs/measurements.md): far below what FP8 rounds
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
    """``codes``: uint8 [N, K], packed, of the numbers + 128. ``scale`` as ``Fp8Weight``'s.
    ``int8_activations``: whether rows are rounded to int8, each by itself, where scales are of rows
    and the chip is a Hopper. Whole numbers are summed exactly.
    """

    scale: Tensor
    int8_activations: bool = False

    def product(self, rows: ProductRows) -> Tensor:
        """``PackedWeight.product``."""
        if not self.takes_bytes:
            return self._of_values(rows.values())
        return _of_bytes(rows.codes(integers=True), self.codes, self.scale, rows.dtype)

    @property
    def takes_bytes(self) -> bool:
        """``PackedWeight.takes_bytes``."""
        return self.int8_activations and self.scale.shape[1] == 1 and _on_hopper()

    def _few(self, x: Tensor, out: Tensor) -> Tensor:
        return capi.linear_int8(x, self.codes, self.scale, prefetch_safe=True, out=out)

    def _unpacked(self, dtype: torch.dtype) -> Tensor:
        return capi.unpack_int8(self.codes, self.scale, dtype)


@dataclass(frozen=True, eq=False)
class Int4Weight(PackedWeight):
    """``codes``, ``scale``, ``zero_point`` as ``capi.linear_int4`` takes them."""

    scale: Tensor
    zero_point: Tensor | None

    def _few(self, x: Tensor, out: Tensor) -> Tensor:
        stored = (self.codes, self.scale, self.zero_point)
        return capi.linear_int4(x, *stored, prefetch_safe=True, out=out)

    def _unpacked(self, dtype: torch.dtype) -> Tensor:
        return capi.unpack_int4(self.codes, self.scale, self.zero_point, dtype)


@dataclass(frozen=True, eq=False)
class Nvfp4Weight(PackedWeight):
    """``codes``, ``scale``, ``row_scale`` as ``capi.linear_nvfp4`` takes them."""

    scale: Tensor
    row_scale: Tensor

    def _few(self, x: Tensor, out: Tensor) -> Tensor:
        stored = (self.codes, self.scale, self.row_scale)
        return capi.linear_nvfp4(x, *stored, prefetch_safe=True, out=out)

    def _unpacked(self, dtype: torch.dtype) -> Tensor:
        return capi.unpack_nvfp4(self.codes, self.scale, self.row_scale, dtype)


def _of_bytes(rows: capi.RowCodes, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of rows and a weight in eight bits each."""
    return capi.linear_w8a8(*rows, codes, scale, dtype, prefetch_safe=True)


@cache
def _capability() -> tuple[int, int]:
    """Of the chip that this process computes on."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def _on_hopper() -> bool:
    return _capability()[0] == _HOPPER


def warn_of_unrounded(activations: str) -> None:
    """Warn where ``engine.activations`` asks for products of bytes that this chip does not have."""
    has = {"fp8": _capability() >= _FP8_CHIP, "int8": _on_hopper()}
    if not has.get(activations, True):
        chip = "sm{}{}".format(*_capability())
        warnings.warn(
            f"engine.activations: {activations}: this GPU ({chip}) multiplies "
            "with such weights in 16 bits, so activations are not rounded. Answers are those of "
            "activations: compute.",
            stacklevel=2,
        )
