"""Make tensors from weight expressions, a few megabytes at a time; used by every backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trt_eagle3.dtype import DType
from trt_eagle3.errors import UserError, clip
from trt_eagle3.graph.formats.format import IntegerFormat, IntegerRows
from trt_eagle3.graph.weight_formats import WEIGHT_FORMATS
from trt_eagle3.graph.weights import StoredTensor, WeightExpr, WeightPart

__all__ = [
    "Piece",
    "Shard",
    "integer_rows",
    "mapped",
    "materialise",
    "pieces",
    "read_chunks",
    "sharded_shape",
]

_CHUNK_BYTES = 1 << 23


@dataclass(frozen=True)
class Shard:
    """One of ``world`` equal pieces of a weight, for one rank of those that share it.

    Each part is cut along ``axis`` of its result (0: rows, outputs; 1: columns, inputs). So a
    rank's piece of a fused projection holds its piece of each projection.
    """

    rank: int
    world: int
    axis: int = 0


class Piece(NamedTuple):
    """Values, and their position in the tensor that is made."""

    where: tuple[slice, ...]
    values: Tensor


def materialise(
    expr: WeightExpr,
    root: Path,
    dtype: DType,
    device: torch.device | str = "cpu",
    shard: Shard | None = None,
) -> Tensor:
    """Make the tensor of ``expr`` in ``dtype`` on ``device``, from files under ``root``.

    A tensor that is stored in its final form is memory-mapped on the CPU. Its values are not
    checked. Otherwise, only the chunk that is being converted is in memory.

    Args:
        shard: the piece to make; only its rows are read, if it is rows on disk. None makes all.
    Raises:
        UserError: ``dtype`` cannot hold a value (the message names its tensor); a file cannot be
            read, or is cut short; a part cannot be cut into equal pieces.
    """
    if expr.is_stored and dtype == expr.dtype and shard is None:
        return mapped(expr.parts[0].stored[0], root).to(device).view(expr.shape)
    assert shard is None or not expr.experts, "experts are not cut"
    made = torch.empty(sharded_shape(expr, shard), dtype=dtype.torch, device=device)
    for where, values in pieces(expr, root, dtype, device, shard):
        made[where] = values
    return made.view(expr.shape) if expr.experts else made


def sharded_shape(expr: WeightExpr, shard: Shard | None) -> tuple[int, ...]:
    """Return the shape of a weight's piece, its parts stacked; without ``shard``, of the whole.

    Raises:
        UserError: a part cannot be cut into equal pieces.
    """
    windows = [_window(part, shard) for part in expr.parts]
    sides = [
        (w.num_columns, w.num_rows) if part.transpose else (w.num_rows, w.num_columns)
        for part, w in zip(expr.parts, windows, strict=True)
    ]
    rows = sum(rows for rows, _ in sides)
    shape = expr.stacked_shape
    return (rows, sides[0][1], *shape[2:])[: len(shape)]


def pieces(
    expr: WeightExpr,
    root: Path,
    dtype: DType,
    device: torch.device | str = "cpu",
    shard: Shard | None = None,
) -> Iterator[Piece]:
    """Read and convert a weight piece by piece, in row-major order unless a part is transposed.

    Raises:
        UserError: see ``materialise``.
    """
    start = 0
    for part in expr.parts:
        window = _window(part, shard)
        size = window.num_columns if part.transpose else window.num_rows
        done = 0
        read = _dequantised_rows if part.quantised else _stored_rows
        for stored in read(expr, part, root, window, device):
            values = _converted(part, root, stored.to(device), dtype)
            taken = slice(done, done + len(stored))
            if part.transpose:
                yield Piece((slice(start, start + size), taken), values.T)
            else:
                yield Piece((slice(start + taken.start, start + taken.stop),), values)
            done = taken.stop
        start += size


def integer_rows(expr: WeightExpr, part: WeightPart, root: Path) -> IntegerRows:
    """Read the integers of an integer part, with their zero points and scales.

    Raises:
        UserError: a file cannot be read, or is cut short.
    """
    form, quantised = WEIGHT_FORMATS[expr.format], part.quantised
    assert isinstance(form, IntegerFormat), expr.format
    assert quantised is not None, part.name
    stored = {t.role: mapped(t, root) for t in part.stored}
    return form.rows(quantised, stored, slice(0, quantised.shape[0]))


def read_chunks(name: str, file: Path, offset: int, sizes: Iterator[int]) -> Iterator[bytearray]:
    """Read consecutive runs of ``sizes`` bytes of a tensor.

    The file is open only during a read, so an unfinished generator holds no file.

    Raises:
        UserError: the file cannot be read, or is cut short.
    """
    for size in sizes:
        chunk = bytearray(size)
        try:
            with file.open("rb") as stream:
                stream.seek(offset)
                count = stream.readinto(chunk)
        except OSError as error:
            raise UserError(
                f"{file}: cannot read {clip(name)}: {error.strerror}. Rebuild the bundle."
            ) from error
        if count != size:
            raise UserError(f"{file}: {clip(name)} is cut short. Download it again.")
        yield chunk
        offset += size


class _Window(NamedTuple):
    """The ranges of a stored tensor's first two axes that are read."""

    first_row: int
    num_rows: int
    first_column: int
    num_columns: int


def _window(part: WeightPart, shard: Shard | None) -> _Window:
    first, end = part.row_range
    shape = part.values_shape
    first_column, end_column = part.column_range
    columns = end_column - first_column if len(shape) > 1 else 1
    whole = _Window(first, end - first, first_column, columns)
    if shard is None:
        return whole
    axis = 1 - shard.axis if part.transpose else shard.axis
    if axis >= len(shape):
        raise UserError(f"{part.name}: has no axis {axis} to cut, its shape is {list(shape)}")
    if axis:
        size = _piece_size(part, columns, shard.world)
        start = first_column + shard.rank * size
        return whole._replace(first_column=start, num_columns=size)
    size = _piece_size(part, whole.num_rows, shard.world)
    return whole._replace(first_row=first + shard.rank * size, num_rows=size)


def _piece_size(part: WeightPart, count: int, world: int) -> int:
    if count % world:
        raise UserError(
            f"{part.name}: {count} cannot be cut into {world} equal pieces. Use a number of GPUs "
            "that divides it."
        )
    return count // world


def _dequantised_rows(
    expr: WeightExpr, part: WeightPart, root: Path, window: _Window, device: torch.device | str
) -> Iterator[Tensor]:
    """Yield consecutive rows float32 [n, ...] of a quantised part, in the window's columns."""
    quantised = part.quantised
    assert quantised is not None, part.name
    stored = {t.role: mapped(t, root).to(device) for t in part.stored}
    form = WEIGHT_FORMATS[expr.format]
    each = max(1, _CHUNK_BYTES // (4 * quantised.shape[1]))
    columns = slice(window.first_column, window.first_column + window.num_columns)
    end = window.first_row + window.num_rows
    for row in range(window.first_row, end, each):
        rows = slice(row, min(end, row + each))
        yield form.dequantise(quantised, stored, rows)[:, columns]


def _stored_rows(
    _expr: WeightExpr, part: WeightPart, root: Path, window: _Window, _device: torch.device | str
) -> Iterator[Tensor]:
    """Yield consecutive rows [n, ...] as stored, limited to the window's columns."""
    row_values = prod(part.shape[1:])
    row_bytes = part.dtype.num_bytes(row_values)
    if not row_bytes or not window.num_rows:
        return
    each = max(1, _CHUNK_BYTES // row_bytes)
    sizes = (min(each, window.num_rows - r) * row_bytes for r in range(0, window.num_rows, each))
    offset = part.offset + window.first_row * row_bytes
    for chunk in read_chunks(part.name, root / part.location, offset, sizes):
        rows = torch.frombuffer(chunk, dtype=part.dtype.torch).view(-1, *part.shape[1:])
        end = window.first_column + window.num_columns
        yield rows[:, window.first_column : end] if rows.ndim > 1 else rows


def _converted(part: WeightPart, root: Path, values: Tensor, dtype: DType) -> Tensor:
    """Convert the values to ``dtype``, multiplied by the part's scale."""
    scaled = values if part.scale == 1.0 else values.float() * part.scale
    made = scaled.to(dtype.torch)
    if not bool(torch.isfinite(made).all()):
        raise _unfit(part, root, float(values[~torch.isfinite(made)][0]), dtype)
    return made


def _unfit(part: WeightPart, root: Path, worst: float, dtype: DType) -> UserError:
    fix = "The checkpoint is damaged. Download it again."
    if abs(worst) < float("inf"):
        most = torch.finfo(dtype.torch).max
        fix = f"{dtype} ends at {most:g}. Build with engine.dtype: bfloat16 or float32."
    return UserError(
        f"{root / part.location}: {part.name} holds {worst:g}, which is no {dtype} value: {fix}"
    )


def mapped(stored: StoredTensor, root: Path) -> Tensor:
    """Memory-map a tensor on disk, without reading it.

    Raises:
        UserError: the file cannot be read, or is cut short.
    """
    file = root / stored.location
    try:
        # mode c (copy on write): torch requires writable memory
        size = (stored.num_bytes,)
        raw = np.memmap(file, dtype=np.uint8, mode="c", offset=stored.offset, shape=size)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file}: cannot map {stored.name}: {error}. Rebuild the bundle."
        ) from error
    return torch.from_numpy(raw).view(stored.dtype.torch).view(stored.shape)
