"""INT4 with compensation (GPTQ, arXiv 2210.17323, section 3).

The columns that are not rounded yet compensate for the error of each rounded column, as far as
their channels correlate.

Shapes: a weight [N, K], G groups of columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.engine.builder.weight_schemes import int4_block, int4_scales

__all__ = ["Compensated", "compensated", "inverse_factor"]

_LEAST_DAMPING, _MOST_DAMPING = 0.01, 1.0
_SHRINKAGE = 0.2
"""Damping per channel and row.

Few rows estimate the correlations of channels badly. With less damping they were trusted too much
(the tiny target on unseen prompts).
"""
_LEAST = 1e-9


@dataclass(frozen=True)
class Compensated:
    """A rounded weight.

    Attributes:
        values: float32 [N, K], each an integer times the scale of its group.
        scales: bfloat16 [N, G].
    """

    values: Tensor
    scales: Tensor


def inverse_factor(products: Tensor, num_rows: int) -> Tensor:
    """Upper U float32 [K, K] with ``U.T @ U`` the inverse of the damped mean ``products``.

    ``products`` are of channels, over ``num_rows``. The damping adds a part of the mean square to
    each square: a fifth of K / rows, at least a hundredth, and more until an inverse exists.
    ``products`` is damped in place.
    """
    squares = products.diagonal().clone()
    mean = squares.mean().clamp(min=_LEAST)
    damping = min(_MOST_DAMPING, max(_LEAST_DAMPING, _SHRINKAGE * len(products) / num_rows))
    while True:
        products.diagonal().copy_(squares + damping * mean)
        upper = _inverse_factor(products)
        if upper is not None:
            return upper
        assert damping < 100 * _MOST_DAMPING, "products of channels are not finite"
        damping *= 10


def _inverse_factor(products: Tensor) -> Tensor | None:
    """Return the factor without more damping; None if the products are not positive definite."""
    factor, failed = torch.linalg.cholesky_ex(products)
    if failed:
        return None
    inverse = torch.cholesky_inverse(factor)
    del factor
    upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
    return None if failed else upper


def compensated(weight: Tensor, factor: Tensor, importance: Tensor) -> Compensated:
    """Round ``weight`` float32 [N, K] from left to right.

    Args:
        factor: ``inverse_factor`` of the products of its input's channels.
        importance: [K], mean squares of the channels; used to choose scales.
    """
    block = int4_block(weight.shape[1])
    left = weight.T.contiguous()  # [K, N]: the numbers of a column are contiguous
    values, scales = torch.empty_like(left), []
    for start in range(0, len(left), block):
        group = slice(start, start + block)
        scales.append(int4_scales(left[group].T.contiguous(), block, importance[group]))
        wide = scales[-1].float()[:, 0]
        changes = _round_group(left[group], factor[group, group], wide, values[group])
        left[group.stop :].addmm_(factor[group, group.stop :].T, changes, alpha=-1)
    return Compensated(values.T.contiguous(), torch.cat(scales, dim=1))


def _round_group(left: Tensor, factor: Tensor, scale: Tensor, values: Tensor) -> Tensor:
    """Round ``left`` [block, N] into ``values``.

    Returns the changes [block, N], in units of ``factor``'s diagonal.
    """
    changes = torch.empty_like(left)
    for i, column in enumerate(left):
        torch.mul((column / scale).round_().clamp_(-8, 7), scale, out=values[i])
        torch.div(column - values[i], factor[i, i], out=changes[i])
        left[i + 1 :].addr_(factor[i, i + 1 :], changes[i], alpha=-1)
    return changes
