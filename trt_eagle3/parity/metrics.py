"""Metrics that compare two tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "Compared",
    "RowErrors",
    "cosines",
    "errors_or_infinite",
    "largest_by_row",
    "leads",
    "margins",
    "relative_error",
    "row_errors",
    "sizes",
]


@dataclass(frozen=True)
class RowErrors:
    """Errors float64 [n] of the rows of one tensor.

    Attributes:
        first: row number of the first error.
        open: bool [n], rows in which rounding may choose other experts; None: no such row.
    """

    case: str
    tensor: str
    errors: Tensor
    first: int = 0
    open: Tensor | None = None


@dataclass(frozen=True)
class Compared:
    """Two tensors [n, ...] that must be equal. ``first``: row number of their first row."""

    case: str
    tensor: str
    actual: Tensor
    expected: Tensor
    first: int = 0


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference over the largest absolute expected value.

    Infinite if any value of ``actual`` is not finite.
    """
    assert actual.shape == expected.shape, (
        f"expected {list(expected.shape)}, got {list(actual.shape)}"
    )
    if not torch.isfinite(actual).all():
        return float("inf")
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """float64 [n]: the relative L2 error of each row, ``|a - e| / |e|``.

    Infinite if a row is not finite. Computed by row, because one row with huge channels (the first
    token of most decoders) would hide the errors of all other rows.
    """
    assert actual.shape == expected.shape, (
        f"expected {list(expected.shape)}, got {list(actual.shape)}"
    )
    a, e = actual.double().flatten(1), expected.to(actual.device).double().flatten(1)
    norms = e.norm(dim=1)
    errors = (a - e).norm(dim=1) / torch.where(norms > 0, norms, torch.ones_like(norms))
    return torch.nan_to_num(errors, nan=torch.inf, posinf=torch.inf).cpu()


def errors_or_infinite(actual: Tensor, expected: Tensor) -> Tensor:
    """``row_errors``; one infinite error if the shapes differ."""
    if actual.shape != expected.shape:
        return torch.tensor([torch.inf])
    return row_errors(actual, expected)


def largest_by_row(actual: Tensor, expected: Tensor) -> Tensor:
    """float64 [n]: the largest absolute difference in each row; infinite if it is NaN."""
    difference = (actual.double() - expected.double()).abs()
    return difference.reshape(len(actual), -1).amax(dim=1).nan_to_num(nan=torch.inf)


def cosines(actual: Tensor, expected: Tensor) -> Tensor:
    """float64 [n]: the cosine of each row with the expected row; -1 if a row is not finite."""
    found = torch.nn.functional.cosine_similarity(actual.double(), expected.double(), dim=1)
    return torch.nan_to_num(found, nan=-1.0)


def margins(logits: Tensor) -> Tensor:
    """float64 [n]: probability of each row's best token minus that of its second best."""
    best = logits.double().softmax(dim=-1).topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


def sizes(rows: Tensor) -> Tensor:
    """float64 [n]: the root mean square of each row, the unit in which ties are measured."""
    return rows.double().square().mean(dim=-1).sqrt()


def leads(logits: Tensor) -> Tensor:
    """float64 [n]: best logit of each row minus its second best, over the size of the row."""
    best = logits.double().topk(2, dim=-1).values
    return (best[:, 0] - best[:, 1]) / sizes(logits).clamp(min=1e-30)
