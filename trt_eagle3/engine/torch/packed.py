"""Quantised weights that the torch session multiplies with as they are, on CUDA.

Up to 64 rows our kernels read the quantised numbers once, up to 128 twice, and compute with 16-bit
activations: each product is that of the dequantised weight, summed in float32. More rows, as of
prompts, go through stock products: with the weight dequantised for the call, or, where
``engine.activations`` and an FP8 checkpoint say that activations are FP8 too, with rows quantised
(by 128 columns where the scales change along K). Then few rows are rounded to the same FP8 values
before they are multiplied: what a row gives does not depend on how many there are.

Shapes: n rows of x, K inputs, N outputs. T is the compute type, float16 or bfloat16.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from trt_eagle3.engine.torch import capi
from trt_eagle3.engine.torch.packing import pack_fp8, pack_int4, pack_int8
from trt_eagle3.engine.weights import integer_rows, mapped
from trt_eagle3.graph.formats.format import IntegerFormat, IntegerRows
from trt_eagle3.graph.weight_formats import WEIGHT_FORMATS
from trt_eagle3.graph.weights import WeightExpr, WeightPart

__all__ = ["Fp8Weight", "Int4Weight", "Int8Weight", "PackedWeight", "fp8_scales", "pack"]

_FEW_ROWS = 2 * capi.MAX_LINEAR_ROWS  # reading a weight twice is less than dequantising it
_COMPUTE = (torch.float16, torch.bfloat16)
_BLOCK = 128  # rows and columns of an FP8 scale that the kernels know
_INT8_ZERO = 128  # the zero point of every group
_ROWS = 16  # stock products with scales of blocks take multiples
_FP8_CHIP = (8, 9)  # the first that multiplies FP8


class PackedWeight(ABC):
    """A weight [N, K] that is kept quantised."""

    @abstractmethod
    def linear(self, x: Tensor) -> Tensor:
        """``x [n, K] @ weight.T``: T [n, N]."""


@dataclass(frozen=True, eq=False)
class Fp8Weight(PackedWeight):
    """``codes``: float8_e4m3fn [N, K], packed. ``scale``: float32 [N, 1], or with K / 128 columns
    and N or ceil(N / 128) rows. ``fp8_activations``: whether rows are rounded to FP8, each by
    itself, where the chip multiplies FP8 and T is bfloat16.
    """

    codes: Tensor
    scale: Tensor
    fp8_activations: bool = False

    def linear(self, x: Tensor) -> Tensor:
        """``PackedWeight.linear``."""
        rounds = self._rounds(x)
        if rounds and len(x) > capi.MAX_LINEAR_ROWS:
            return self._quantised(x)
        if rounds:
            x = capi.round_rows(x, blocks=self._blocks)

        def product(rows: Tensor, out: Tensor) -> Tensor:
            return capi.linear_fp8(rows, self.codes, self.scale, prefetch_safe=True, out=out)

        y = _in_passes(product, x, len(self.codes))
        return self._dequantised(x) if y is None else y

    @property
    def _blocks(self) -> bool:
        """Whether the scales change along K."""
        return self.scale.shape[1] > 1

    def _rounds(self, x: Tensor) -> bool:
        """Whether rows are rounded to FP8: never of one number of rows alone."""
        stock = not self._blocks or len(self.scale) * _BLOCK == len(self.codes)
        chip = torch.cuda.get_device_capability() >= _FP8_CHIP
        return self.fp8_activations and stock and chip and x.dtype == torch.bfloat16

    def _quantised(self, x: Tensor) -> Tensor:
        """With the rows of ``x`` in FP8: stock products."""
        blocks = self._blocks
        padded = functional.pad(x, (0, 0, 0, -len(x) % _ROWS)) if blocks else x
        q, scale = capi.quantise_rows(padded, blocks=blocks)
        y = torch._scaled_mm(q, self.codes.T, scale.T, self.scale.T, out_dtype=x.dtype)
        return y[: len(x)]

    def _dequantised(self, x: Tensor) -> Tensor:
        return functional.linear(x, capi.unpack_fp8(self.codes, self.scale, x.dtype))


@dataclass(frozen=True, eq=False)
class Int8Weight(PackedWeight):
    """``codes``: uint8 [N, K], packed, of the numbers + 128. ``scale`` as ``Fp8Weight``'s."""

    codes: Tensor
    scale: Tensor

    def linear(self, x: Tensor) -> Tensor:
        """``PackedWeight.linear``."""

        def product(rows: Tensor, out: Tensor) -> Tensor:
            return capi.linear_int8(rows, self.codes, self.scale, prefetch_safe=True, out=out)

        y = _in_passes(product, x, len(self.codes))
        if y is not None:
            return y
        return functional.linear(x, capi.unpack_int8(self.codes, self.scale, x.dtype))


@dataclass(frozen=True, eq=False)
class Int4Weight(PackedWeight):
    """``codes``, ``scale``, ``zero_point`` as ``capi.linear_int4`` takes them."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None

    def linear(self, x: Tensor) -> Tensor:
        """``PackedWeight.linear``."""
        stored = (self.codes, self.scale, self.zero_point)

        def product(rows: Tensor, out: Tensor) -> Tensor:
            return capi.linear_int4(rows, *stored, prefetch_safe=True, out=out)

        y = _in_passes(product, x, len(self.codes))
        if y is not None:
            return y
        return functional.linear(x, capi.unpack_int4(*stored, x.dtype))


def _in_passes(
    product: Callable[[Tensor, Tensor], Tensor], x: Tensor, num_outputs: int
) -> Tensor | None:
    """T [n, num_outputs] of ``product(rows of x, rows of out)``, as many rows at a time as the
    kernels take; None for too many, and where the chip has none for so many.
    """
    if len(x) > _FEW_ROWS:
        return None
    out = x.new_empty(len(x), num_outputs)
    with contextlib.suppress(NotImplementedError):  # before Hopper
        for rows, part in zip(
            x.split(capi.MAX_LINEAR_ROWS), out.split(capi.MAX_LINEAR_ROWS), strict=True
        ):
            product(rows, part)
        return out
    return None


def pack(
    expr: WeightExpr, root: Path, device: torch.device, *, fp8_activations: bool = False
) -> PackedWeight | None:
    """The weight of ``expr`` packed on ``device``; None where the kernels do not know its form:
    another format, compute type, number of columns, or grouping.

    ``fp8_activations``: many rows are multiplied in FP8 where the checkpoint says so.

    Raises:
        UserError: a file cannot be read, or is cut short.
    """
    known = expr.dtype.torch in _COMPUTE and len(expr.shape) == 2
    if not known or expr.shape[0] % capi.PACKED_ROWS or expr.shape[1] % capi.PACKED_COLUMNS:
        return None
    form = WEIGHT_FORMATS.get(expr.format)
    if expr.format == "fp8":
        return _pack_fp8(expr, root, device, fp8_activations)
    if isinstance(form, IntegerFormat):
        return (_pack_int4 if form.bits == 4 else _pack_int8)(expr, root, device)
    return None


def _pack_fp8(
    expr: WeightExpr, root: Path, device: torch.device, fp8_activations: bool
) -> Fp8Weight | None:
    grids = [fp8_scales(part, root, device) for part in expr.parts]
    whole = [grid for grid in grids if grid is not None]
    if len(whole) < len(grids):
        return None
    codes = torch.empty(expr.shape, dtype=torch.float8_e4m3fn, device=device)
    start = 0
    for part in expr.parts:
        stored = {t.role: t for t in part.stored}["codes"]
        taken = mapped(stored, root)[slice(*part.row_range), slice(*part.column_range)].to(device)
        part_codes = (taken.T if part.transpose else taken).contiguous()
        codes[start : start + len(part_codes)] = pack_fp8(part_codes)
        start += len(part_codes)
    columns = max(grid.shape[1] for grid in whole)
    dynamic = all(part.quantised and part.quantised.fp8_activations for part in expr.parts)
    scales = _merged([g.expand(-1, columns) for g in whole])
    return Fp8Weight(codes, scales, fp8_activations and dynamic)


def fp8_scales(part: WeightPart, root: Path, device: torch.device) -> Tensor | None:
    """float32 [rows made, 1 or K / 128]: a scale of every row that the part makes; None: another
    block.
    """
    quantised = part.quantised
    assert quantised is not None, part.name
    (_, columns), (block_rows, block_columns) = quantised.shape, quantised.block
    stored = {t.role: t for t in part.stored}["scale"]
    grid = mapped(stored, root).to(device).float().reshape(-1, -(-columns // block_columns))
    first, end, outer, inner = *part.row_range, block_rows, block_columns
    if part.transpose:
        first, end, outer, inner = *part.column_range, block_columns, block_rows
        grid, columns = grid.T, quantised.shape[0]
    if inner < columns and inner != _BLOCK:
        return None
    return grid[torch.arange(first, end, device=device) // outer] * part.scale


def _merged(grids: list[Tensor]) -> Tensor:
    """The scales of all rows; those of 128 columns once for each 128 rows that are alike."""
    scales = torch.cat(grids)
    if scales.shape[1] == 1:
        return scales
    blocks = scales[::_BLOCK]
    alike = torch.equal(blocks.repeat_interleave(_BLOCK, 0)[: len(scales)], scales)
    return (blocks if alike else scales).contiguous()


def _pack_int4(expr: WeightExpr, root: Path, device: torch.device) -> Int4Weight | None:
    codes = torch.empty(expr.shape[0], expr.shape[1] // 8, dtype=torch.int32, device=device)
    scales, zeros, start = [], [], 0
    for part in expr.parts:
        rows = _rows_of(integer_rows(expr, part, root), part)
        group = _group_columns(rows.groups)
        if group is None:
            return None
        codes[start : start + len(rows.codes)] = pack_int4(rows.codes.to(device))
        start += len(rows.codes)
        repeat = group // min(group, _BLOCK)
        scales.append((rows.scales * part.scale).to(device).repeat_interleave(repeat, 1))
        zeros.append(rows.zeros.to(device).repeat_interleave(repeat, 1))
    if len({scale.shape[1] for scale in scales}) > 1:
        return None
    scale = _in_16_bits(torch.cat(scales))
    zero = torch.cat(zeros)
    symmetric = bool((zero == 8).all())
    return None if scale is None else Int4Weight(codes, scale, None if symmetric else zero)


def _pack_int8(expr: WeightExpr, root: Path, device: torch.device) -> Int8Weight | None:
    codes = torch.empty(expr.shape, dtype=torch.uint8, device=device)
    scales, start = [], 0
    for part in expr.parts:
        rows = _rows_of(integer_rows(expr, part, root), part)
        scale = _int8_scales(rows)
        if scale is None or not bool((rows.zeros == _INT8_ZERO).all()):
            return None
        codes[start : start + len(rows.codes)] = pack_int8(rows.codes.to(device))
        start += len(rows.codes)
        scales.append((scale * part.scale).to(device))
    columns = max(scale.shape[1] for scale in scales)
    return Int8Weight(codes, torch.cat([s.expand(-1, columns) for s in scales]).contiguous())


def _int8_scales(rows: IntegerRows) -> Tensor | None:
    """float32 [n, 1 or K / 128]; None: groups that the kernels do not know."""
    columns = rows.codes.shape[1]
    if rows.scales.shape[1] == 1:
        return rows.scales
    group = _group_columns(rows.groups)
    if group is None or group % _BLOCK:
        return None
    return rows.scales if group == columns else rows.scales.repeat_interleave(group // _BLOCK, 1)


def _rows_of(rows: IntegerRows, part: WeightPart) -> IntegerRows:
    """The rows that the part takes."""
    taken = slice(*part.row_range)
    return IntegerRows(rows.codes[taken], rows.zeros[taken], rows.scales[taken], rows.groups)


def _group_columns(groups: Tensor) -> int | None:
    """Columns of a group where all are alike and consecutive, and the kernels know their number."""
    columns = len(groups)
    count = int(groups.max()) + 1
    group = columns // count
    if group * count != columns or not torch.equal(groups, torch.arange(columns) // group):
        return None
    return group if group in capi.GROUP_SIZES or group % _BLOCK == 0 else None


def _in_16_bits(scale: Tensor) -> Tensor | None:
    """``scale`` as bfloat16 or float16, whichever holds it exactly; None where neither does."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(scale.to(dtype).float(), scale):
            return scale.to(dtype).contiguous()
    return None
