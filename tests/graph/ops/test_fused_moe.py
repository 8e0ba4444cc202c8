"""FusedMoe: torch functions and lowerings, of packed experts too, against the equation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor

from tests.graph.ops.test_linear_packed import words
from tests.reference.compare import FAULT_FLOOR, FLOAT32_TOLERANCE
from trt_eagle3.engine.torch.packing import pack_fp8, pack_int4
from trt_eagle3.graph.ops import DOMAIN, EVERY_OP
from trt_eagle3.graph.ops.fused_moe import fused_moe
from trt_eagle3.parity.metrics import relative_error

EXPERTS, HIDDEN, INNER = 5, 256, 128
FLOAT = TensorProto.FLOAT
Weights = tuple[Tensor, Tensor]
Case = tuple[str, list[Tensor], dict[str, int]]


def expected(
    x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, renormalise: int
) -> Tensor:
    """The sum over experts of each row by itself, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row, chances in enumerate(logits.double().softmax(-1)):
        best = chances.argsort(descending=True)[:top_k]
        total = chances[best].sum() if renormalise else 1.0
        for expert in best:
            gate, up = (gate_up[expert].double() @ x[row].double()).chunk(2)
            inner = gate / (1 + (-gate).exp()) * up
            out[row] += chances[expert] / total * (down[expert].double() @ inner)
    return out


def dense_case(_kind: str = "") -> tuple[Weights, Case]:
    torch.manual_seed(4)
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN) / 16
    down = torch.randn(EXPERTS, HIDDEN, INNER) / 11
    return (gate_up, down), ("FusedMoe", [gate_up, down], {})


def fp8_case(scales: str) -> tuple[Weights, Case]:
    torch.manual_seed(5)
    values, stored = [], []
    for rows, columns in ((2 * INNER, HIDDEN), (HIDDEN, INNER)):
        codes = (torch.randn(EXPERTS, rows, columns) * 100).clamp(-448, 448)
        codes = codes.to(torch.float8_e4m3fn)
        grid = {"row": (rows, 1), "block": (rows // 128, columns // 128)}[scales]
        scale = (torch.rand(EXPERTS, *grid) + 0.1) / 1600
        each = scale.repeat_interleave(rows // grid[0], 1)
        values.append(codes.float() * each.repeat_interleave(columns // grid[1], 2))
        packed = torch.stack([pack_fp8(own).view(torch.int32) for own in codes])
        stored += [packed, scale]
    return (values[0], values[1]), ("FusedMoeFp8", stored, {})


def int4_case(kind: str) -> tuple[Weights, Case]:
    torch.manual_seed(6)
    values, stored, zeros = [], [], []
    group = 64
    for rows, columns in ((2 * INNER, HIDDEN), (HIDDEN, INNER)):
        codes = torch.randint(0, 16, (EXPERTS, rows, columns), dtype=torch.uint8)
        scale = ((torch.rand(EXPERTS, rows, columns // group) + 0.1) / 64).bfloat16()
        zero = torch.randint(0, 16, scale.shape, dtype=torch.uint8)
        about = zero.repeat_interleave(group, 2).float() if kind == "zeros" else 8.0
        values.append((codes.float() - about) * scale.float().repeat_interleave(group, 2))
        stored.append(torch.stack([pack_int4(own) for own in codes]))
        groups = scale.shape[2]
        stored.append(words(scale, groups).view(EXPERTS, -1, groups))
        zeros.append(words(zero, groups).view(EXPERTS, -1, groups))
    given = zeros if kind == "zeros" else []
    attributes = {"scale_type": int(TensorProto.BFLOAT16)}
    return (values[0], values[1]), ("FusedMoeInt4", [*stored, *given], attributes)


CASES: dict[str, Callable[[], tuple[Weights, Case]]] = {
    "dense": dense_case,
    **{f"fp8 {kind}": (lambda k=kind: fp8_case(k)) for kind in ("row", "block")},
    **{f"int4 {kind}": (lambda k=kind: int4_case(k)) for kind in ("eight", "zeros")},
}


def lowered(op_type: str, opset: int, inputs: list[Tensor], attributes: dict[str, int]) -> Tensor:
    """What ONNX Runtime computes of the lowering in ``opset``."""
    op = EVERY_OP[op_type]
    overload = op.overload(len(inputs))
    function = op.function_17(overload, op_type, FLOAT) if opset == 17 else op.function(overload)
    names = op.inputs[overload]
    node = helper.make_node(op_type, names, ["y"], domain=DOMAIN, **attributes)
    if opset != 17:
        node.overload = overload
    kinds = {torch.float32: FLOAT, torch.int32: TensorProto.INT32}
    given = [
        helper.make_tensor_value_info(name, kinds[value.dtype], value.shape)
        for name, value in zip(names, inputs, strict=True)
    ]
    graph = helper.make_graph([node], "g", given, [helper.make_tensor_value_info("y", FLOAT, None)])
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    version = 8 if opset == 17 else 10
    model = helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=version)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    fed = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
    return torch.from_numpy(np.array(session.run(None, fed)[0]))


def computed(how: str, case: Case, x: Tensor, logits: Tensor, **attributes: int) -> Tensor:
    op_type, stored, own = case
    if how == "torch":
        found: Tensor = EVERY_OP[op_type].torch_function(x, logits, *stored, **attributes, **own)
        return found
    return lowered(op_type, int(how.split()[1]), [x, logits, *stored], {**attributes, **own})


@pytest.mark.parametrize("how", ["torch", "opset 17", "opset 24"])
@pytest.mark.parametrize("case", CASES)
def test_fused_moe_follows_the_equation(case: str, how: str) -> None:
    (gate_up, down), described = CASES[case]()
    for rows, top_k, renormalise in ((1, 1, 1), (7, 3, 0), (19, 2, 1)):
        torch.manual_seed(rows)
        x, logits = torch.randn(rows, HIDDEN), 2 * torch.randn(rows, EXPERTS)
        sizes = {"top_k": top_k, "renormalise": renormalise}
        found = computed(how, described, x, logits, **sizes)
        assert (
            relative_error(found, expected(x, logits, gate_up, down, **sizes)) < FLOAT32_TOLERANCE
        )


FAULTS: dict[str, dict[str, Any]] = {
    "one expert too few": {"top_k": 1},
    "one expert too many": {"top_k": 3},
    "not renormalised": {"renormalise": 0},
}


@pytest.mark.parametrize("fault", [*FAULTS, "gate and up exchanged", "next expert's down"])
def test_fused_moe_planted_fault_is_caught(fault: str) -> None:
    (gate_up, down), described = dense_case()
    torch.manual_seed(0)
    x, logits = torch.randn(6, HIDDEN), torch.randn(6, EXPERTS)
    wrong = {
        "gate and up exchanged": (gate_up.roll(INNER, 1), down),
        "next expert's down": (gate_up, down.roll(1, 0)),
    }.get(fault, (gate_up, down))
    sizes = {"top_k": 2, "renormalise": 1, **FAULTS.get(fault, {})}
    found = computed("opset 24", described, x, logits, top_k=2, renormalise=1)
    assert relative_error(found, expected(x, logits, *wrong, **sizes)) > FAULT_FLOOR


def test_fused_moe_rounds_the_sum_over_experts_once() -> None:
    """Of bfloat16 the error is that of one rounding of y and one of the inner values."""
    (gate_up, down), _ = dense_case()
    torch.manual_seed(2)
    logits = torch.stack([torch.randperm(EXPERTS) for _ in range(9)]) / 2  # no two are alike
    given = [torch.randn(9, HIDDEN), logits, gate_up, down]
    short = [tensor.bfloat16() for tensor in given]
    found = fused_moe(*short, top_k=4, renormalise=1)
    assert found.dtype == torch.bfloat16
    right = expected(*(tensor.float() for tensor in short), top_k=4, renormalise=1)
    assert relative_error(found.float(), right) < 2.0**-8


@pytest.mark.parametrize("case", ["fp8 block", "int4 zeros"])
def test_fused_moe_planted_word_is_noticed(case: str) -> None:
    _, (op_type, stored, own) = CASES[case]()
    torch.manual_seed(3)
    x, logits = torch.randn(4, HIDDEN), torch.zeros(4, EXPERTS)
    logits[:, 2] = 9.0
    sizes = {"top_k": 1, "renormalise": 1}
    before = computed("torch", (op_type, stored, own), x, logits, **sizes)
    stored[2][2, 5, 3] += 1 << 8
    after = computed("torch", (op_type, stored, own), x, logits, **sizes)
    assert set((before != after).nonzero()[:, 1].tolist()) == {5}
