"""SiluMul's reference lowering follows the equation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.ops.one_node import SEEDS, run_op
from tests.reference.compare import FAULT_FLOOR, FLOAT32_TOLERANCE
from trt_eagle3.parity.metrics import relative_error


@settings(max_examples=30)
@given(
    rows=st.integers(1, 20),
    width=st.integers(1, 65),
    scale=st.sampled_from([1.0, 30.0]),
    seed=SEEDS,
)
def test_silu_mul_of_any_shape_follows_the_equation(
    rows: int, width: int, scale: float, seed: int
) -> None:
    torch.manual_seed(seed)
    gate, up = scale * torch.randn(rows, width), torch.randn(rows, width)
    out = run_op("SiluMul", "", {"gate_up": torch.cat([gate, up], dim=-1)})["out"]
    assert (
        relative_error(out, gate.double() / (1 + (-gate.double()).exp()) * up) < FLOAT32_TOLERANCE
    )


@pytest.mark.parametrize("fault", ["gate and up exchanged", "sigmoid alone", "no up"])
def test_silu_mul_planted_fault_is_caught(fault: str) -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(2, 5, 16)
    expected = {
        "gate and up exchanged": torch.nn.functional.silu(up) * gate,
        "sigmoid alone": torch.sigmoid(gate) * up,
        "no up": torch.nn.functional.silu(gate),
    }[fault]
    out = run_op("SiluMul", "", {"gate_up": torch.cat([gate, up], dim=-1)})["out"]
    assert relative_error(out, expected) > FAULT_FLOOR
