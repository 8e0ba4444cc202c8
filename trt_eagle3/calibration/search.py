"""Which scales of an input's channels leave INT4 weights the least error: AWQ's search (arXiv
2306.00978, section 3.2), over powers of the activations' magnitudes and of the weights'.

Shapes: n samples, K input channels, N outputs of a weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trt_eagle3.calibration.activations import RowStatistics
from trt_eagle3.engine.builder.calibration import Fold
from trt_eagle3.engine.builder.weight_schemes import int4_block, int4_rounded, int4_scales

__all__ = ["MAX_OUTPUTS", "NUM_TRIALS", "search_scales"]

MAX_OUTPUTS = 1024
"""Outputs of a weight that errors are measured on; all are scaled alike."""
_EXPONENTS = tuple(i / 5 for i in range(6))
_RATIO = 0.93  # of the largest value of a group: the end of INT4's range while scales are tried
NUM_TRIALS = 2 * len(_EXPONENTS)
"""Times that each weight is rounded."""
_LEAST = 1e-4


def search_scales(
    fold: Fold, weights: Sequence[Tensor], statistics: RowStatistics, norm: Tensor | None
) -> Tensor:
    """float32: the best scales of a fold's channels.

    Args:
        weights: float32 [N, K], of its consumers. statistics: of their input.
        norm: the producer as it is stored where it is a norm's weight; what it can hold decides
            which scales there are.
    """
    sampled = [w[:: -(-len(w) // MAX_OUTPUTS)] for w in weights]
    x = statistics.samples
    magnitude = statistics.mean_magnitude
    candidates = [
        scales if norm is None else _held(fold, norm.to(scales.device), _exact(fold, scales))
        for scales in _candidates(fold, sampled, magnitude)
    ]
    return min(candidates, key=lambda scales: _error(sampled, x, fold.to_columns(scales)))


def _candidates(fold: Fold, weights: Sequence[Tensor], magnitude: Tensor) -> Iterator[Tensor]:
    """Of the fold's channels; first all 1."""
    x = fold.to_channels(magnitude).clamp(min=_LEAST)
    w = fold.to_channels(_relative(torch.cat(list(weights)))).clamp(min=_LEAST)
    for exponent in _EXPONENTS:
        for divisor in (torch.ones_like(w), w ** (1 - exponent)):
            scales = x**exponent / divisor
            yield scales / (scales.max() * scales.min()).sqrt()


def _relative(weight: Tensor) -> Tensor:
    """[K]: mean size of a column's numbers, each relative to the largest of its group."""
    groups = weight.abs().unflatten(1, (-1, int4_block(weight.shape[1])))
    relative = groups / groups.amax(dim=-1, keepdim=True).clamp(min=_LEAST)
    sizes: Tensor = relative.flatten(1).mean(dim=0)
    return sizes


def _exact(fold: Fold, scales: Tensor) -> Tensor:
    """The nearest powers of two, where a fold asks for them."""
    return scales.log2().round().exp2() if fold.exact else scales


def _held(fold: Fold, norm: Tensor, scales: Tensor) -> Tensor:
    """The scales that ``norm``, divided by them, holds without rounding; 1 where it cannot."""
    whole = norm.float() + fold.offset
    divided = (whole / scales - fold.offset).to(norm.dtype).float() + fold.offset
    exact = whole / divided
    return torch.where(exact.isfinite() & (exact > 0), exact, torch.ones_like(exact))


def _error(weights: Sequence[Tensor], x: Tensor, columns: Tensor) -> float:
    """Mean over the weights of the squared error of their products, over the products' squares."""
    errors = []
    for weight in weights:
        scaled = weight * columns
        block = int4_block(weight.shape[1])
        scales = int4_scales(scaled, block, ratios=[_RATIO])
        rounded = int4_rounded(scaled, scales, block) / columns
        change = (x @ (rounded - weight).T).square().sum()
        errors.append(change / (x @ weight.T).square().sum().clamp(min=_LEAST))
    return float(torch.stack(errors).mean())
