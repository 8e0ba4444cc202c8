"""Pack the quantised weights of a checkpoint for the kernels (``packed.py``)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from trt_eagle3.engine import capi
from trt_eagle3.engine.runtime.weights import integer_rows, mapped
from trt_eagle3.engine.torch.packed import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Nvfp4Weight,
    PackedWeight,
)
from trt_eagle3.engine.torch.packing import pack_fp8, pack_int4, pack_int8
from trt_eagle3.graph.formats.format import IntegerFormat, IntegerRows
from trt_eagle3.graph.formats.nvfp4 import Nvfp4Format
from trt_eagle3.graph.weight_formats import WEIGHT_FORMATS
from trt_eagle3.graph.weights import WeightExpr, WeightPart

__all__ = ["fp8_scales", "pack"]

_COMPUTE = (torch.float16, torch.bfloat16)
_BLOCK = 128  # rows and columns of an FP8 scale that the kernels support
_INT8_ZERO = 128  # the only zero point that the kernels support


def pack(
    expr: WeightExpr, root: Path, device: torch.device, *, activations: str = "compute"
) -> PackedWeight | None:
    """Pack the weight of ``expr`` on ``device``.

    Returns None if the kernels do not support its format, compute type, number of columns or
    grouping.

    ``activations``: ``engine.activations``; FP8 also needs a checkpoint with FP8 activations.

    Raises:
        UserError: a file cannot be read, or is cut short.
    """
    known = expr.dtype.torch in _COMPUTE and len(expr.shape) == 2
    if not known or expr.shape[0] % capi.PACKED_ROWS or expr.shape[1] % capi.PACKED_COLUMNS:
        return None
    form = WEIGHT_FORMATS.get(expr.format)
    if expr.format == "fp8":
        return _pack_fp8(expr, root, device, activations == "fp8")
    if isinstance(form, Nvfp4Format):
        return _pack_nvfp4(expr, form, root, device)
    if isinstance(form, IntegerFormat) and form.bits == 4:
        return _pack_int4(expr, root, device)
    if isinstance(form, IntegerFormat):
        return _pack_int8(expr, root, device, activations == "int8")
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
    """Return a scale for every output row of the part, float32 [rows, 1 or K / 128]; None if the
    block is not supported.
    """
    quantised = part.quantised
    assert quantised is not None, part.name
    (_, columns), (block_rows, block_columns) = quantised.shape, quantised.block
    stored = {t.role: t for t in part.stored}["scale"]
    grid = mapped(stored, root).to(device).float().reshape(-1, -(-columns // block_columns))
    first, end, outer, inner = *part.row_range, block_rows, block_columns
    taken = part.column_range
    if part.transpose:
        first, end, outer, inner = *part.column_range, block_columns, block_rows
        grid, columns, taken = grid.T, quantised.shape[0], part.row_range
    if inner < columns:
        blocks = _blocks(taken, columns, inner)
        if inner != _BLOCK or blocks is None:
            return None
        grid = grid[:, blocks]
    return grid[torch.arange(first, end, device=device) // outer] * part.scale


def _blocks(taken: tuple[int, int], columns: int, size: int) -> slice | None:
    """Return the blocks of ``size`` that the columns ``taken`` consist of; None if they cut one."""
    first, end = taken
    if first % size or (end % size and end != columns):
        return None
    return slice(first // size, -(-end // size))


def _merged(grids: list[Tensor]) -> Tensor:
    """Merge the scales of all rows. Scales of 128 columns are stored once for 128 equal rows."""
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
        rows = _slice_of(integer_rows(expr, part, root), part)
        group = None if rows is None else _group_columns(rows.groups)
        if rows is None or group is None:
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


def _pack_nvfp4(
    expr: WeightExpr, form: Nvfp4Format, root: Path, device: torch.device
) -> Nvfp4Weight | None:
    codes = torch.empty(expr.shape[0], expr.shape[1] // 8, dtype=torch.int32, device=device)
    scales, row_scales, start = [], [], 0
    for part in expr.parts:
        assert part.quantised is not None, part.name
        stored, (first, end) = {t.role: mapped(t, root) for t in part.stored}, part.row_range
        columns = part.quantised.shape[1]
        blocks = _blocks(part.column_range, columns, part.quantised.block[1])
        if stored["scale"].dtype != torch.float8_e4m3fn or blocks is None:
            return None
        taken = form.codes(stored, slice(first, end))[:, slice(*part.column_range)]
        codes[start : start + end - first] = pack_int4(taken.contiguous().to(device))
        start += end - first
        scales.append(stored["scale"][first:end, blocks].to(device))
        whole = form.whole_scale(stored) * part.scale
        row_scales.append(whole.to(device).expand(end - first, 1))
    return Nvfp4Weight(codes, torch.cat(scales).contiguous(), torch.cat(row_scales).contiguous())


def _pack_int8(
    expr: WeightExpr, root: Path, device: torch.device, int8_activations: bool
) -> Int8Weight | None:
    codes = torch.empty(expr.shape, dtype=torch.uint8, device=device)
    scales, start = [], 0
    for part in expr.parts:
        rows = _slice_of(integer_rows(expr, part, root), part)
        scale = None if rows is None else _int8_scales(rows)
        if rows is None or scale is None or not bool((rows.zeros == _INT8_ZERO).all()):
            return None
        codes[start : start + len(rows.codes)] = pack_int8(rows.codes.to(device))
        start += len(rows.codes)
        scales.append((scale * part.scale).to(device))
    columns = max(scale.shape[1] for scale in scales)
    scale = torch.cat([s.expand(-1, columns) for s in scales]).contiguous()
    return Int8Weight(codes, scale, int8_activations)


def _int8_scales(rows: IntegerRows) -> Tensor | None:
    """Return float32 [n, 1 or K / 128]; None if the kernels do not support the groups."""
    columns = rows.codes.shape[1]
    if rows.scales.shape[1] == 1:
        return rows.scales
    group = _group_columns(rows.groups)
    if group is None or group % _BLOCK:
        return None
    return rows.scales if group == columns else rows.scales.repeat_interleave(group // _BLOCK, 1)


def _slice_of(rows: IntegerRows, part: WeightPart) -> IntegerRows | None:
    """Return the rows and columns that the part takes; None if its groups are not consecutive."""
    taken, columns = slice(*part.row_range), slice(*part.column_range)
    groups = rows.groups[columns]
    low, high = int(groups.min()), int(groups.max()) + 1
    if part.columns is not None and not bool((groups.diff() >= 0).all()):
        return None
    own = slice(low, high)
    return IntegerRows(
        rows.codes[taken, columns].contiguous(),
        rows.zeros[taken, own],
        rows.scales[taken, own],
        groups - low,
    )


def _group_columns(groups: Tensor) -> int | None:
    """Return the columns of a group; None if groups differ, are not consecutive or unsupported."""
    columns = len(groups)
    count = int(groups.max()) + 1
    group = columns // count
    if group * count != columns or not torch.equal(groups, torch.arange(columns) // group):
        return None
    return group if group in capi.GROUP_SIZES or group % _BLOCK == 0 else None


def _in_16_bits(scale: Tensor) -> Tensor | None:
    """Return ``scale`` as bfloat16 or float16, if one of them holds it exactly; else None."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(scale.to(dtype).float(), scale):
            return scale.to(dtype).contiguous()
    return None
