"""Weight expressions of every kind, with their tensors on disk and what they must make."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import strategies as st
from torch import Tensor

from trt_eagle3.dtype import COMPUTE_DTYPES, DType
from trt_eagle3.graph.formats.format import IntegerRows
from trt_eagle3.graph.weights import WeightExpr, WeightPart

FILE = "w.raw"
SCALES = (1.0, 0.5, 1 / 64, 4.0)


@dataclass(frozen=True)
class Case:
    """An expression, and the tensors [as stored] of its parts."""

    expr: WeightExpr
    stored: tuple[Tensor, ...]

    def write(self, root: Path) -> None:
        """Put the tensors where the expression says."""
        data = bytearray(max(p.offset + p.num_bytes for p in self.expr.parts))
        for part, tensor in zip(self.expr.parts, self.stored, strict=True):
            raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            data[part.offset : part.offset + part.num_bytes] = raw
        (root / FILE).write_bytes(data)

    def expected(self) -> Tensor:
        """The weight by definition: everything in float64, rounded once."""
        parts = zip(self.expr.parts, self.stored, strict=True)
        return torch.cat([taken(p, tensor) for p, tensor in parts]).to(self.expr.dtype.torch)


def taken(part: WeightPart, stored: Tensor) -> Tensor:
    """float64: what the weight takes of a stored tensor."""
    first, end = part.rows or (0, len(stored))
    values = stored.double()[first:end] * part.scale
    return values.T if part.transpose else values


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[DType, ...] = COMPUTE_DTYPES, unit: int = 1) -> Case:
    """Weights of 1 to 4 parts; ``unit`` divides every size."""
    columns = unit * draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    parts, stored, end = [], [], 0
    for i in range(draw(st.integers(1, 4))):
        transpose, rows = draw(st.booleans()), unit * draw(st.integers(1, 6))
        taken, other = (columns, rows) if transpose else (rows, columns)
        above, below = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        dtype = draw(st.sampled_from(COMPUTE_DTYPES))
        shape = (above + taken + below, other)
        tensor = torch.randn(shape, generator=generator).to(dtype.torch)
        window = None if above == below == 0 else (above, above + taken)
        place = (f"t{i}", FILE, end, tensor.numel() * dtype.bits // 8)
        scale = draw(st.sampled_from(SCALES))
        parts.append(WeightPart(*place, dtype, shape, window, transpose, scale))
        stored.append(tensor)
        end += place[3]
    return Case(WeightExpr(tuple(parts), draw(st.sampled_from(dtypes))), tuple(stored))


def no_integers(_expr: WeightExpr, part: WeightPart) -> IntegerRows:
    """What unpacks integer weights where there are none."""
    raise AssertionError(f"{part.name} is not quantised")
