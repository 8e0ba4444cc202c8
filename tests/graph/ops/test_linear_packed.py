"""Products with packed weights: lowerings and torch functions against codes times scales."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, inliner
from torch import Tensor

from trt_eagle3.engine.torch.packing import pack_fp8, pack_int4, pack_int8
from trt_eagle3.graph.ops import DOMAIN, EVERY_OP

INNER, OUTER = 256, 208  # OUTER is no multiple of 128
FP8_SCALES = {"row": (OUTER, 1), "tensor": (1, 1), "block": (2, 2), "row and block": (OUTER, 2)}
FLOAT = TensorProto.FLOAT


def words(values: Tensor, width: int) -> Tensor:
    """The bytes of ``values`` as int32 [.., width]."""
    return values.contiguous().flatten().view(torch.uint8).view(torch.int32).view(-1, width)


def fp8_case(scales: str) -> tuple[Tensor, list[Tensor], dict[str, int]]:
    """Values float32 [N, K], and the op's inputs and attributes."""
    torch.manual_seed(1)
    codes = (torch.randn(OUTER, INNER) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    codes[:, ::5] = (codes[:, ::5].float() / 4096).to(codes.dtype)  # subnormals too
    scale = torch.rand(FP8_SCALES[scales]) + 0.1
    row = torch.arange(OUTER) // {OUTER: 1, 2: 128, 1: OUTER}[len(scale)]
    column = torch.arange(INNER) // (INNER // scale.shape[1])
    inputs = [pack_fp8(codes).view(torch.int32), scale]
    return codes.float() * scale[row][:, column], inputs, {}


def int8_case(scales: str) -> tuple[Tensor, list[Tensor], dict[str, int]]:
    torch.manual_seed(3)
    codes = torch.randint(0, 256, (OUTER, INNER), dtype=torch.uint8)
    scale = torch.rand(FP8_SCALES[scales]) + 0.1
    row = torch.arange(OUTER) // {OUTER: 1, 2: 128, 1: OUTER}[len(scale)]
    column = torch.arange(INNER) // (INNER // scale.shape[1])
    inputs = [pack_int8(codes).view(torch.int32), scale]
    return (codes.float() - 128) * scale[row][:, column], inputs, {}


def int4_case(
    group: int, dtype: torch.dtype, zeros: bool
) -> tuple[Tensor, list[Tensor], dict[str, int]]:
    torch.manual_seed(2)
    codes = torch.randint(0, 16, (OUTER, INNER), dtype=torch.uint8)
    scale = (torch.rand(OUTER, INNER // group) + 0.1).to(dtype)
    scale[::7] *= 2.0**-16  # of float16 no normal numbers
    zero = torch.randint(0, 16, scale.shape, dtype=torch.uint8)
    column = torch.arange(INNER) // group
    about = codes.float() - (zero[:, column].float() if zeros else 8.0)
    inputs = [pack_int4(codes), words(scale, scale.shape[1])]
    given = [words(zero, scale.shape[1])] if zeros else []
    kind = TensorProto.BFLOAT16 if dtype == torch.bfloat16 else TensorProto.FLOAT16
    return about * scale.float()[:, column], [*inputs, *given], {"scale_type": kind}


CASES: dict[str, tuple[str, Any]] = {
    **{f"fp8 {scales}": ("LinearFp8", lambda s=scales: fp8_case(s)) for scales in FP8_SCALES},
    **{
        f"int8 {scales}": ("LinearInt8", lambda s=scales: int8_case(s))
        for scales in ("row", "row and block")
    },
    **{
        f"int4 {group} {dtype} {zeros}": (
            "LinearInt4",
            lambda g=group, d=dtype, z=zeros: int4_case(g, d, z),
        )
        for group, dtype, zeros in [
            (128, torch.bfloat16, False),
            (64, torch.float16, True),
            (32, torch.bfloat16, True),
            (32, torch.float16, False),
        ]
    },
}


def lowered(op_type: str, opset: int, inputs: list[Tensor], attributes: dict[str, int]) -> Tensor:
    """What ONNX Runtime computes of the lowering in ``opset``."""
    op = EVERY_OP[op_type]
    overload = op.overload(len(inputs))
    function = op.function_17(overload, op_type, FLOAT) if opset == 17 else op.function(overload)
    names = op.inputs[overload]
    kinds = {torch.float32: FLOAT, torch.int32: TensorProto.INT32}
    node = helper.make_node(op_type, names, ["y"], domain=DOMAIN, **attributes)
    if opset != 17:
        node.overload = overload
    given = [
        helper.make_tensor_value_info(name, kinds[value.dtype], value.shape)
        for name, value in zip(names, inputs, strict=True)
    ]
    graph = helper.make_graph([node], "g", given, [helper.make_tensor_value_info("y", FLOAT, None)])
    model = helper.make_model(
        graph,
        functions=[function],
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)],
        ir_version=8 if opset == 17 else 11,
    )
    session = onnxruntime.InferenceSession(
        inliner.inline_local_functions(model).SerializeToString()
    )
    fed = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
    return torch.from_numpy(np.array(session.run(None, fed)[0]))


@pytest.mark.parametrize("how", ["torch", "opset 17", "opset 24"])
@pytest.mark.parametrize("case", CASES)
def test_packed_product_is_that_of_its_values(case: str, how: str) -> None:
    op_type, draw = CASES[case]
    values, stored, attributes = draw()
    x = torch.eye(INNER)
    if how == "torch":
        found = EVERY_OP[op_type].torch_function(x, *stored, **attributes)
    else:
        found = lowered(op_type, int(how.split()[1]), [x, *stored], attributes)
    assert torch.equal(found, values.T)


@pytest.mark.parametrize("case", ["fp8 block", "int4 64 torch.float16 True"])
def test_packed_product_planted_word_is_noticed(case: str) -> None:
    op_type, draw = CASES[case]
    values, stored, attributes = draw()
    stored[0][3, 5] += 1 << 8
    found = EVERY_OP[op_type].torch_function(torch.eye(INNER), *stored, **attributes)
    assert (values != found.T).sum() == 1
