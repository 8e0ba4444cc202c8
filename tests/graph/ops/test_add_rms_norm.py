"""AddRmsNorm's reference lowering against ``tests/reference/ops.py``."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.ops.one_node import SEEDS, run_op
from tests.reference import ops
from tests.reference.compare import FAULT_FLOOR, FLOAT32_TOLERANCE
from trt_eagle3.parity.metrics import relative_error


@settings(max_examples=50)
@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 97),
    epsilon=st.sampled_from([1e-6, 1e-5, 0.1]),
    seed=SEEDS,
)
def test_add_rms_norm_of_any_shape_follows_the_equation(
    rows: int, width: int, epsilon: float, seed: int
) -> None:
    torch.manual_seed(seed)
    x, residual, weight = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    plain = run_op("AddRmsNorm", "", {"x": x, "weight": weight}, epsilon=epsilon)
    added = run_op(
        "AddRmsNorm", "residual", {"x": x, "weight": weight, "residual": residual}, epsilon=epsilon
    )
    assert relative_error(plain["y"], ops.rms_norm(x, weight, epsilon)) < FLOAT32_TOLERANCE
    assert (
        relative_error(added["y"], ops.rms_norm(x + residual, weight, epsilon)) < FLOAT32_TOLERANCE
    )
    assert torch.equal(added["sum"], x + residual)


@pytest.mark.parametrize("fault", ["no residual", "no weight", "epsilon", "layer norm"])
def test_add_rms_norm_planted_fault_is_caught(fault: str) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(5, 16), torch.randn(5, 16), 1 + torch.randn(16)
    total = x + residual
    expected = {
        "no residual": ops.rms_norm(x, weight, 1e-6),
        "no weight": ops.rms_norm(total, torch.ones(16), 1e-6),
        "epsilon": ops.rms_norm(total, weight, 0.01),
        "layer norm": ops.rms_norm(total - total.mean(-1, keepdim=True), weight, 1e-6),
    }[fault]
    out = run_op(
        "AddRmsNorm", "residual", {"x": x, "weight": weight, "residual": residual}, epsilon=1e-6
    )
    assert relative_error(out["y"], expected) > FAULT_FLOOR
