"""Search the scales of an input's channels that give INT4 weights the least error.

This is AWQ's search (arXiv 2306.00978, section 3.2), over powers of the magnitudes of activations
and of weights.

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
"""Number of outputs of a weight on which errors are measured; all outputs share the scales."""
_EXPONENTS = tuple(i / 5 for i in range(6))
_RATIO = 0.93  # while scales are tried, INT4's range ends at this share of a group's largest value
NUM_TRIALS = 2 * len(_EXPONENTS)
"""Number of times that each weight is rounded."""
_LEAST = 1e-4


def search_scales(
    fold: Fold, weights: Sequence[Tensor], statistics: RowStatistics, norm: Tensor | None
) -> Tensor:
    """float32: the best scales of a fold's channels.

    Args:
        weights: float32 [N, K], of its consumers.
        statistics: of their input.
        norm: the stored producer if it is a norm's weight. It must represent the divided values
            exactly, which limits the scales.
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
    """Yield scales of the fold's channels; all 1 first."""
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
    """Return the nearest powers of two if the fold requires them."""
    return scales.log2().round().exp2() if fold.exact else scales


def _held(fold: Fold, norm: Tensor, scales: Tensor) -> Tensor:
    """Return scales by which ``norm`` can be divided without rounding; 1 where impossible."""
    whole = norm.float() + fold.offset
    divided = (whole / scales - fold.offset).to(norm.dtype).float() + fold.offset
    exact = whole / divided
    return torch.where(exact.isfinite() & (exact > 0), exact, torch.ones_like(exact))


def _error(weights: Sequence[Tensor], x: Tensor, columns: Tensor) -> float:
    """Mean over weights of the squared error of their products, over the products' squares."""
    errors = []
    for weight in weights:
        scaled = weight * columns
        block = int4_block(weight.shape[1])
        scales = int4_scales(scaled, block, ratios=[_RATIO])
        rounded = int4_rounded(scaled, scales, block) / columns
        change = (x @ (rounded - weight).T).square().sum()
        errors.append(change / (x @ weight.T).square().sum().clamp(min=_LEAST))
    return float(torch.stack(errors).mean())
