"""Make tensors from weight expressions, a few megabytes at a time; used by every backend."""

from __future__ import annotations

from collections.abc import Iterator
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
    "integer_rows",
    "mapped",
    "materialise",
    "pieces",
    "read_chunks",
]

_CHUNK_BYTES = 1 << 23


class Piece(NamedTuple):
    """Values, and their position in the tensor that is made."""

    where: tuple[slice, ...]
    values: Tensor


def materialise(
    expr: WeightExpr, root: Path, dtype: DType, device: torch.device | str = "cpu"
) -> Tensor:
    """Make the tensor of ``expr`` in ``dtype`` on ``device``, from files under ``root``.

    A tensor that is stored in its final form is memory-mapped on the CPU. Its values are not
    checked. Otherwise, only the chunk that is being converted is in memory.

    Raises:
        UserError: ``dtype`` cannot hold a value (the message names its tensor); a file cannot be
            read, or is cut short.
    """
    if expr.is_stored and dtype == expr.dtype:
        return mapped(expr.parts[0].stored[0], root).to(device).view(expr.shape)
    made = torch.empty(expr.stacked_shape, dtype=dtype.torch, device=device)
    for where, values in pieces(expr, root, dtype, device):
        made[where] = values
    return made.view(expr.shape)


def pieces(
    expr: WeightExpr, root: Path, dtype: DType, device: torch.device | str = "cpu"
) -> Iterator[Piece]:
    """Read and convert a weight piece by piece, in row-major order unless a part is transposed.

    Raises:
        UserError: see ``materialise``.
    """
    start = 0
    for part in expr.parts:
        size, done = part.made_shape[0], 0
        read = _dequantised_rows if part.quantised else _stored_rows
        for stored in read(expr, part, root, device):
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


def _dequantised_rows(
    expr: WeightExpr, part: WeightPart, root: Path, device: torch.device | str
) -> Iterator[Tensor]:
    """Yield consecutive rows float32 [n, ...] of a quantised part, in its columns."""
    quantised = part.quantised
    assert quantised is not None, part.name
    stored = {t.role: mapped(t, root).to(device) for t in part.stored}
    form = WEIGHT_FORMATS[expr.format]
    each = max(1, _CHUNK_BYTES // (4 * quantised.shape[1]))
    first, end = part.row_range
    for row in range(first, end, each):
        rows = slice(row, min(end, row + each))
        yield form.dequantise(quantised, stored, rows)[:, slice(*part.column_range)]


def _stored_rows(
    _expr: WeightExpr, part: WeightPart, root: Path, _device: torch.device | str
) -> Iterator[Tensor]:
    """Yield consecutive rows [n, ...] as stored, in the part's columns."""
    first, end = part.row_range
    row_bytes = part.dtype.num_bytes(prod(part.shape[1:]))
    if not row_bytes or first == end:
        return
    each = max(1, _CHUNK_BYTES // row_bytes)
    if part.columns is not None:  # reads no other columns
        whole = mapped(part.stored[0], root)
        for row in range(first, end, each):
            yield whole[row : min(end, row + each), slice(*part.columns)].clone()
        return
    sizes = (min(each, end - row) * row_bytes for row in range(first, end, each))
    offset = part.offset + first * row_bytes
    for chunk in read_chunks(part.name, root / part.location, offset, sizes):
        yield torch.frombuffer(chunk, dtype=part.dtype.torch).view(-1, *part.shape[1:])


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
