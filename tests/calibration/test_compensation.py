"""GPTQ's compensation, on inputs whose channels go together and on such that do not."""

from __future__ import annotations

import torch

from trt_eagle3.calibration.compensation import compensated, inverse_factor
from trt_eagle3.engine.builder.weight_schemes import int4_rounded, int4_scales

ROWS, K = 48, 192


def test_compensated_of_independent_channels_is_rounding() -> None:
    weight = torch.randn(ROWS, K)
    made = compensated(weight, inverse_factor(torch.eye(K), 1 << 20), torch.ones(K))
    scales = int4_scales(weight, 64)
    assert torch.equal(made.scales, scales)
    torch.testing.assert_close(made.values, int4_rounded(weight, scales, 64))


def test_compensated_of_correlated_channels_leaves_products_less_error_than_rounding() -> None:
    x = torch.randn(400, 40) @ torch.randn(40, K) + 0.1 * torch.randn(400, K)
    weight, products = torch.randn(ROWS, K), x.T @ x / len(x)
    made = compensated(weight, inverse_factor(products.clone(), 400), products.diagonal())
    rounded = int4_rounded(weight, int4_scales(weight, 64), 64)
    ours, theirs = (float((x @ (w - weight).T).norm()) for w in (made.values, rounded))
    assert ours < 0.4 * theirs
    groups = made.values.unflatten(1, (-1, 64)) / made.scales.float()[..., None]
    torch.testing.assert_close(groups, groups.round(), rtol=0, atol=1e-4)
    assert groups.round().abs().max() <= 8


def test_inverse_factor_of_singular_products_is_of_damped_ones() -> None:
    one = torch.rand(K, 1)
    factor = inverse_factor(one @ one.T, 1 << 20)  # rank 1
    damped = one @ one.T + 0.01 * one.square().mean() * torch.eye(K)
    error = (factor.T @ factor @ damped - torch.eye(K)).abs().max()
    assert error < 1e-2
    assert inverse_factor(torch.zeros(K, K), 1).isfinite().all()
