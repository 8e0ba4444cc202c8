"""Which nodes the torch session joins on CUDA; what the joined steps compute is a GPU test
(test_torch.py).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trt_eagle3.engine import capi
from trt_eagle3.engine.torch.fusion import Step, fused, gemm, layer_norm
from trt_eagle3.engine.torch.ops import gelu
from trt_eagle3.engine.torch.packed import PackedWeight
from trt_eagle3.engine.torch.product_rows import ProductRows
from trt_eagle3.graph.ops.add_rms_norm import add_rms_norm
from trt_eagle3.graph.ops.silu_mul import silu_mul

PRODUCT = Step(gemm, ("x", "w", "b"), ("y",), {"transB": 1})
GELU = Step(gelu, ("y",), ("z",), {"approximate": b"tanh"})
SUM = Step(torch.add, ("x", "r"), ("s",), {})
NORM = Step(layer_norm, ("s", "scale", "bias"), ("n",), {"axis": -1, "epsilon": 1e-6})
SILU = Step(torch.neg, ("gate_up",), ("inner",), {}, op="SiluMul")
ROWS_NORM = Step(torch.neg, ("x", "scale", "r"), ("n", "s"), {"epsilon": 1e-6}, op="AddRmsNorm")
OTHER = Step(torch.neg, ("y",), ("o",), {})


def test_gelu_of_a_product_is_one_step() -> None:
    (joined,) = fused([PRODUCT, GELU], kept=["z"])
    assert (joined.inputs, joined.outputs) == (("x", "w", "b"), ("z",))


def test_gelu_of_a_product_that_others_read_stays_a_step() -> None:
    assert fused([PRODUCT, GELU, OTHER], kept=["z", "o"]) == [PRODUCT, GELU, OTHER]
    assert fused([PRODUCT, GELU], kept=["y", "z"]) == [PRODUCT, GELU]


def test_gelu_of_another_kind_or_without_a_bias_stays_a_step() -> None:
    exact = Step(gelu, ("y",), ("z",), {"approximate": b"none"})
    bare = Step(gemm, ("x", "w"), ("y",), {"transB": 1})
    assert fused([PRODUCT, exact], kept=["z"]) == [PRODUCT, exact]
    assert fused([bare, GELU], kept=["z"]) == [bare, GELU]


def test_norm_of_a_sum_is_one_step_in_the_sums_place() -> None:
    reader = Step(torch.neg, ("s",), ("o",), {})
    joined, after = fused([SUM, reader, NORM], kept=["n", "s"])
    assert (joined.inputs, joined.outputs) == (("x", "r", "scale", "bias"), ("s", "n"))
    assert joined.attributes == NORM.attributes
    assert after is reader


def test_a_sum_joins_one_norm_alone() -> None:
    second = Step(layer_norm, ("s", "scale2", "bias2"), ("n2",), {})
    joined, left = fused([SUM, NORM, second], kept=["n", "n2"])
    assert joined.outputs == ("s", "n")
    assert left is second


def product_of(rows: str) -> Step:
    return Step(gemm, (rows, "packed"), ("y",), {"transB": 1}, op="Gemm")


def test_what_makes_the_rows_of_a_product_of_bytes_is_joined_to_it() -> None:
    (joined,) = fused([SILU, product_of("inner")], ["y"], {"packed"})
    assert (joined.inputs, joined.outputs) == (("packed", "gate_up"), ("y",))
    (joined,) = fused([ROWS_NORM, product_of("n")], ["y", "s"], {"packed"})
    assert (joined.inputs, joined.outputs) == (("packed", "x", "scale", "r"), ("y", "s"))
    assert joined.attributes == {"epsilon": 1e-6}


def test_rows_that_others_read_too_or_of_another_weight_stay_a_step() -> None:
    steps = [SILU, product_of("inner")]
    assert fused(steps, ["y"], ()) == steps
    assert fused(steps, ["y", "inner"], {"packed"}) == steps
    reader = Step(torch.neg, ("inner",), ("o",), {})
    assert fused([*steps, reader], ["y", "o"], {"packed"}) == [*steps, reader]


def test_a_norm_whose_sum_is_read_before_the_product_stays_a_step() -> None:
    reader = Step(torch.neg, ("s",), ("o",), {})
    steps = [ROWS_NORM, reader, product_of("n")]
    assert fused(steps, ["y", "o"], {"packed"}) == steps
    joined, after = fused([ROWS_NORM, product_of("n"), reader], ["y", "o"], {"packed"})
    assert joined.outputs == ("y", "s")
    assert after is reader


class _Recorded(PackedWeight):
    """Says which rows it was given."""

    def product(self, rows: ProductRows) -> Tensor:
        return rows.values() + self.codes

    def _few(self, x: Tensor, out: Tensor) -> Tensor:
        raise AssertionError((x, out))

    def _unpacked(self, dtype: torch.dtype) -> Tensor:
        raise AssertionError(dtype)


def test_joined_steps_compute_what_the_two_steps_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capi, "silu_mul", silu_mul)
    monkeypatch.setattr(capi, "add_rms_norm", lambda *a, **k: _pair(add_rms_norm(*a, **k)))
    weight, x, other = _Recorded(torch.ones(1)), torch.randn(3, 8), torch.randn(3, 8)
    (joined,) = fused([SILU, product_of("inner")], ["y"], {"packed"})
    assert torch.equal(joined.function(weight, x), silu_mul(x) + 1)
    (joined,) = fused([ROWS_NORM, product_of("n")], ["y", "s"], {"packed"})
    y, total = joined.function(weight, x, x[0], other, epsilon=1e-6)
    normed, expected = add_rms_norm(x, x[0], other, epsilon=1e-6)
    assert torch.equal(y, normed + 1)
    assert torch.equal(total, expected)
    assert torch.equal(
        joined.function(weight, x, x[0], epsilon=1e-6), add_rms_norm(x, x[0], epsilon=1e-6) + 1
    )


def _pair(found: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    return found if isinstance(found, tuple) else (found, None)
