"""Quantisation schemes for 16-bit weights: FP8 and INT8 scale each row, INT4 each group.

Shapes: n rows of a weight [N, K], G groups of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.checkpoint.tensor_file import Content, tensor_content
from trt_eagle3.dtype import LARGEST_FP8
from trt_eagle3.errors import UserError

__all__ = [
    "INT4_RATIOS",
    "SCHEMES",
    "ReadRows",
    "Scheme",
    "int4_block",
    "int4_rounded",
    "int4_scales",
]

_GROUPS = (128, 64, 32)
INT4_RATIOS = tuple(0.7 + 0.035 * i for i in range(12))
"""Candidates for the end of INT4's range, as fractions of a group's largest value."""
_CACHED = 1 << 17
"""Values of one search step on a CPU: they fit into a core's cache."""
_ON_DEVICE = 1 << 24
"""Values of one search step on a GPU, which needs many."""

ReadRows = Callable[[], Iterable[Tensor]]
"""Yields consecutive rows float32 [n, K] of a weight; each call reads them again."""


@dataclass(frozen=True)
class Scheme:
    """How a weight is quantised.

    Attributes:
        format: a key of ``WEIGHT_FORMATS``. names: of the codes' and the scales' tensor.
        block: columns of the weight -> columns that share a scale. scales: rows [n, K] -> scales
            [n, G], as stored.
        codes: rows and their scales -> codes, as stored.
    """

    format: str
    names: tuple[str, str]
    dtype: str
    block: Callable[[int], int]
    scales: Callable[[Tensor, int], Tensor]
    codes: Callable[[Tensor, Tensor, int], Tensor]
    packed: int = 1

    def content(self, rows: ReadRows, shape: tuple[int, int]) -> dict[str, Content]:
        """Return the tensors of the weight [N, K] of ``rows``, by the last part of their names."""
        block = self.block(shape[1])
        scales = torch.cat([self.scales(values, block) for values in rows()])

        def chunks() -> Iterator[bytes]:
            done = 0
            for values in rows():
                own = scales[done : done + len(values)].float()
                done += len(values)
                yield from tensor_content(self.codes(values, own, block)).chunks()

        codes = Content(self.dtype, (shape[0], -(-shape[1] // self.packed)), chunks)
        return dict(zip(self.names, (codes, tensor_content(scales)), strict=True))


def _row_scales(most: float) -> Callable[[Tensor, int], Tensor]:
    def scales(values: Tensor, _block: int) -> Tensor:
        largest = values.abs().amax(dim=1, keepdim=True)
        return torch.where(largest > 0, largest / most, torch.ones_like(largest))

    return scales


def _fp8_codes(values: Tensor, scales: Tensor, _block: int) -> Tensor:
    return (values / scales).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)


def _int8_codes(values: Tensor, scales: Tensor, _block: int) -> Tensor:
    return (values / scales).round().clamp(-127, 127).to(torch.int8)


def int4_scales(
    values: Tensor,
    block: int,
    importance: Tensor | None = None,
    ratios: Iterable[float] = INT4_RATIOS,
) -> Tensor:
    """Return scales bfloat16 [n, G] of rows float32 [n, K].

    For each group, the candidate with the least squared error is taken. Each column's error is
    weighted by its ``importance`` [K].
    """
    found = [_best_scales(part, block, importance, ratios) for part in _parts(values)]
    return torch.cat(found)


def int4_rounded(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Round ``values`` float32 [n, K] to INT4 with ``scales`` [n, G]; return the rounded values."""
    wide = scales.float()[..., None]
    groups = values.unflatten(1, (-1, block)) / wide
    rounded: Tensor = groups.round_().clamp_(-8, 7).mul_(wide).flatten(1)
    return rounded


def _parts(values: Tensor) -> tuple[Tensor, ...]:
    size = _CACHED if values.device.type == "cpu" else _ON_DEVICE
    parts: tuple[Tensor, ...] = values.split(max(1, size // values.shape[1]))
    return parts


def _best_scales(
    values: Tensor, block: int, importance: Tensor | None, ratios: Iterable[float]
) -> Tensor:
    """Compute ``int4_scales`` for rows that fit into a cache."""
    groups = values.unflatten(1, (-1, block))
    weights = None if importance is None else importance.view(-1, block)
    largest = groups.abs().amax(dim=-1)
    best, least = torch.ones_like(largest).bfloat16(), torch.full_like(largest, torch.inf)
    for ratio in ratios:
        scale = (largest * (ratio / 7.5)).clamp(min=1e-12).bfloat16()
        wide = scale.float()[..., None]
        rounded = (groups / wide).round_().clamp_(-8, 7).mul_(wide)
        squares = rounded.sub_(groups).square_()
        error = (squares if weights is None else squares.mul_(weights)).sum(dim=-1)
        better = (error < least) & (largest > 0)
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return best


def _int4_codes(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Pack codes as int32 [n, K / 8]: the numbers + 8, lowest bits first."""
    groups = values.unflatten(1, (-1, block)) / scales[..., None]
    numbers = (groups.round().clamp(-8, 7) + 8).flatten(1).int().unflatten(1, (-1, 8))
    places = torch.arange(0, 32, 4, dtype=torch.int32, device=values.device)
    shifted: Tensor = numbers << places
    return shifted.sum(dim=-1).int()


def int4_block(columns: int) -> int:
    """Return the columns of an INT4 group, for rows of ``columns`` columns.

    Raises:
        UserError: no group size divides the rows.
    """
    block = next((group for group in _GROUPS if columns % group == 0), None)
    if block is None:
        raise UserError(
            f"engine.weights: int4 cuts rows into groups of {', '.join(map(str, _GROUPS))}; this "
            f"target has rows of {columns}. Use int8 or fp8."
        )
    return block


_NAMES = ("weight", "weight_scale")
SCHEMES: Mapping[str, Scheme] = {
    "fp8": Scheme("fp8", _NAMES, "F8_E4M3", int, _row_scales(LARGEST_FP8), _fp8_codes),
    "int8": Scheme("int8", _NAMES, "I8", int, _row_scales(127), _int8_codes),
    "int4": Scheme(
        "int4_packed",
        ("weight_packed", "weight_scale"),
        "I32",
        int4_block,
        int4_scales,
        _int4_codes,
        packed=8,
    ),
}
"""``engine.weights`` -> its scheme. Tensors have the names of compressed-tensors."""
