"""Which steps the torch session joins to a dense layer; what the kernels compute is a GPU test
(tests/plugins/test_dense_layer.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.plugins.dense_layer_case import draw_layer
from trt_eagle3.engine import capi
from trt_eagle3.engine.torch.dense_layer import DENSE_LAYER, with_dense_layers
from trt_eagle3.engine.torch.fusion import Step, gemm
from trt_eagle3.engine.torch.packed import Int4Weight, PackedWeight
from trt_eagle3.graph.ops.add_rms_norm import add_rms_norm
from trt_eagle3.graph.ops.silu_mul import silu_mul

CPU = torch.device("cpu")


def layer(i: int) -> list[Step]:
    """The steps from attention's output to the next layer's q, k and v."""
    stream, norm = f"total.{i}", {"epsilon": 1e-6}

    def product(x: str, weight: str, y: str) -> Step:
        return Step(gemm, (x, weight), (y,), {"transB": 1}, op="Gemm")

    def add_norm(x: str, weight: str, residual: str, y: str, total: str) -> Step:
        return Step(add_rms_norm, (x, weight, residual), (y, total), norm, op="AddRmsNorm")

    return [
        Step(torch.neg, (f"qkv.{i}",), (f"attended.{i}",), {}, op="TreeAttention"),
        product(f"attended.{i}", "o", f"attention.{i}"),
        add_norm(f"attention.{i}", "norm", stream, f"normed.{i}", f"middle.{i}"),
        product(f"normed.{i}", "gate_up", f"gate_up.{i}"),
        Step(silu_mul, (f"gate_up.{i}",), (f"inner.{i}",), {}, op="SiluMul"),
        product(f"inner.{i}", "down", f"down.{i}"),
        add_norm(f"down.{i}", "next_norm", f"middle.{i}", f"next.{i}", f"total.{i + 1}"),
        product(f"next.{i}", "qkv", f"qkv.{i + 1}"),
    ]


STEPS = [*layer(0), *layer(1)]
KEPT = ("qkv.2", "total.2")


@pytest.fixture
def constants() -> dict[str, Any]:
    case = draw_layer("int4", (256, 256, 384, 512), torch.bfloat16, CPU)
    names = ("o", "gate_up", "down", "qkv")
    return dict(zip(names, case.weights, strict=True)) | {
        "norm": case.norms[0],
        "next_norm": case.norms[1],
    }


def test_layers_of_one_form_are_a_step_each(constants: dict[str, Any]) -> None:
    found = with_dense_layers(STEPS, constants, KEPT, CPU)
    assert [step.op for step in found] == ["TreeAttention", DENSE_LAYER] * 2
    assert found[3].inputs[:2] == ("attended.1", "total.1")
    assert found[3].outputs == ("qkv.2", "total.2", "middle.1")


def test_a_layer_without_qkv_ends_with_the_product_of_down(constants: dict[str, Any]) -> None:
    found = with_dense_layers(STEPS[:7], constants, ("next.0", "total.1"), CPU)
    assert [step.op for step in found] == ["TreeAttention", DENSE_LAYER, "AddRmsNorm"]
    assert found[1].outputs == ("down.0", "middle.0")


def test_a_value_that_is_kept_or_read_elsewhere_keeps_its_step(constants: dict[str, Any]) -> None:
    for name in ("attention.0", "normed.0", "gate_up.0", "inner.0"):
        reader = Step(torch.neg, (name,), ("other",), {})
        for steps, kept in ((STEPS, (*KEPT, name)), ([*STEPS, reader], (*KEPT, "other"))):
            found = [step.op for step in with_dense_layers(steps, constants, kept, CPU)]
            assert found.count(DENSE_LAYER) == 1, name


def test_streams_may_be_read_elsewhere(constants: dict[str, Any]) -> None:
    kept = (*KEPT, "middle.0", "total.1")
    found = [step.op for step in with_dense_layers(STEPS, constants, kept, CPU)]
    assert found.count(DENSE_LAYER) == 2


def test_weights_of_other_forms_stay_single_products(constants: dict[str, Any]) -> None:
    gate_up: Int4Weight = constants["gate_up"]
    other = draw_layer("fp8 channel", (256, 256, 384, 512), torch.bfloat16, CPU).weights[1]
    fine = Int4Weight(gate_up.codes, gate_up.scale.repeat_interleave(2, 1), None)
    halves = Int4Weight(gate_up.codes, gate_up.scale.half(), None)
    for weight in (other, fine, halves, torch.zeros(768, 256)):
        found = with_dense_layers(STEPS, {**constants, "gate_up": weight}, KEPT, CPU)
        assert found == STEPS


def test_the_variable_keeps_single_products(
    constants: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRT_EAGLE3_DENSE_LAYER", "0")
    assert with_dense_layers(STEPS, constants, KEPT, CPU) == STEPS


@pytest.mark.parametrize("rows", [3, 40])
def test_where_no_kernel_takes_them_the_step_computes_single_products(
    rows: int, constants: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError

    def linear(self: PackedWeight, x: Tensor) -> Tensor:
        return x @ (self.codes[:, :1] % 7).to(x.dtype).T.expand(x.shape[1], -1) * 1e-3

    monkeypatch.setattr(capi, "dense_layer_int4", refuse)
    monkeypatch.setattr(capi, "add_rms_norm", add_rms_norm)
    monkeypatch.setattr(capi, "silu_mul", silu_mul)
    monkeypatch.setattr(PackedWeight, "linear", linear)
    x, residual = torch.randn(2, rows, 256).bfloat16()
    values = {**constants, "attended.0": x, "total.0": residual}
    joined = with_dense_layers(STEPS[1:8], constants, ("qkv.1", "total.1", "middle.0"), CPU)
    wanted = run(STEPS[1:8], values)
    got = run(joined, values)
    for name in ("qkv.1", "total.1", "middle.0"):
        assert torch.equal(got[name], wanted[name]), name


def run(steps: list[Step], values: dict[str, Any]) -> dict[str, Any]:
    found = dict(values)
    for step in steps:
        made = step.function(*(found[name] for name in step.inputs), **step.attributes)
        made = made if isinstance(made, tuple) else (made,)
        found.update(zip(step.outputs, made, strict=True))
    return found
