"""Which nodes the torch session joins on CUDA; what the joined steps compute is a GPU test
(test_torch.py).
"""

from __future__ import annotations

import torch

from trt_eagle3.engine.torch.fusion import Step, fused, gemm, layer_norm
from trt_eagle3.engine.torch.ops import gelu

PRODUCT = Step(gemm, ("x", "w", "b"), ("y",), {"transB": 1})
GELU = Step(gelu, ("y",), ("z",), {"approximate": b"tanh"})
SUM = Step(torch.add, ("x", "r"), ("s",), {})
NORM = Step(layer_norm, ("s", "scale", "bias"), ("n",), {"axis": -1, "epsilon": 1e-6})
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
