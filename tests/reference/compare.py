"""How two tensors are compared, and the one tolerance of float32 gates."""

import torch
from torch import Tensor

FLOAT32_TOLERANCE = 1e-5
"""Largest difference over largest reference value. Origin: float32 sums of some hundred terms in another order; the
worst over all graph tests, measured on x86-64 with four hypothesis seeds, is 1.7e-6."""

FAULT_FLOOR = 20 * FLOAT32_TOLERANCE
"""A planted fault must miss by at least this much, so that it is caught with room to spare."""


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference over the largest absolute expected value; infinite where anything is not finite."""
    assert actual.shape == expected.shape, f"expected {list(expected.shape)}, got {list(actual.shape)}"
    if not torch.isfinite(actual).all():
        return float("inf")
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())
