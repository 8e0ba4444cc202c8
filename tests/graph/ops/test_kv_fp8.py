"""Keys and values as FP8: every byte, ties, and what is too large."""

from __future__ import annotations

import onnxruntime
import pytest
import torch
from onnx import helper, parser
from torch import Tensor

from trt_eagle3.dtype import LARGEST_FP8
from trt_eagle3.graph.ops import OPSET, OPSET_17
from trt_eagle3.graph.ops.kv_fp8 import decode, decode_lowering, encode, encode_lowering

ALL = torch.arange(256, dtype=torch.uint8).view(-1, 1, 1)
NUMBERS = ALL[(ALL.flatten() & 0x7F) != 0x7F]  # but for the two that are NaN
ONE = torch.ones(1)


def lowered(x: Tensor, opset: int) -> tuple[Tensor, Tensor]:
    """Codes of ``x`` [n, 1, D] by the nodes, and those decoded again."""
    body = encode_lowering("x", "codes", 0) + decode_lowering("codes", "y", 1, like="x")
    made = parser.parse_function(
        f'<domain: "t", opset_import: ["" : {opset}]> F (x, kv_scales) => (codes, y) {{{body}}}'
    )
    types = {"x": 1, "kv_scales": 1, "codes": 2, "y": 1}
    values = {name: helper.make_tensor_value_info(name, t, None) for name, t in types.items()}
    node = helper.make_node("F", ["x", "kv_scales"], ["codes", "y"], domain="t")
    graph = helper.make_graph(
        [node], "g", [values["x"], values["kv_scales"]], [values["codes"], values["y"]]
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("t", 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=[made], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    found = session.run(None, {"x": x.numpy(), "kv_scales": torch.ones(2, 1).numpy()})
    return torch.from_numpy(found[0]), torch.from_numpy(found[1])


def samples() -> Tensor:
    """Every number, the middle of each two neighbours and its own neighbours, and large ones."""
    numbers = decode(NUMBERS, ONE, torch.float32).flatten().unique()
    middles = (numbers[1:] + numbers[:-1]) / 2
    near = [torch.nextafter(middles, torch.full_like(middles, end)) for end in (-1e9, 1e9)]
    large = torch.tensor([449.0, 464.0, 480.0, 1e30, torch.inf])
    return torch.cat([numbers, middles, *near, large, -large]).view(-1, 1, 1)


def test_encode_and_decode_of_every_byte_is_that_byte() -> None:
    assert torch.equal(encode(decode(NUMBERS, ONE, torch.float32), ONE), NUMBERS)
    for dtype in (torch.float16, torch.bfloat16):  # both hold every number
        exact = decode(NUMBERS, ONE, torch.float32)
        assert torch.equal(decode(NUMBERS, ONE, dtype).float(), exact)


def test_encode_rounds_to_the_nearest_number_and_ties_to_even() -> None:
    x = samples()
    numbers = decode(NUMBERS, ONE, torch.float32).flatten().unique()
    held = x.flatten().clamp(-LARGEST_FP8, LARGEST_FP8)
    found = decode(encode(x, ONE), ONE, torch.float32).flatten()
    nearest = (held[:, None].double() - numbers.double()).abs().min(dim=1).values
    assert torch.equal((held.double() - found.double()).abs(), nearest)
    ties = (held[:, None].double() - numbers.double()).abs() == nearest[:, None]
    tied = ties.sum(dim=1) == 2
    assert int(tied.sum()) >= 250
    assert torch.all(encode(x, ONE).flatten()[tied] % 2 == 0)


def test_encode_saturates_what_is_too_large() -> None:
    x = torch.tensor([1e30, -1e30, torch.inf, 460.0]).view(1, 1, -1)
    assert decode(encode(x, ONE), ONE, torch.float32).flatten().tolist() == [448, -448, 448, 448]
    half = torch.tensor([0.5])
    assert decode(encode(x, half), half, torch.float32).abs().max() == LARGEST_FP8 / 2


@pytest.mark.parametrize("opset", [OPSET_17, OPSET])
def test_lowering_gives_the_bytes_of_encode_and_the_numbers_of_decode(opset: int) -> None:
    x = samples()
    x = x[x != 0].view(-1, 1, 1)  # the nodes have one zero, torch has two
    codes, numbers = lowered(x, opset)
    assert torch.equal(codes, encode(x, ONE))
    assert torch.equal(numbers, decode(codes, ONE, torch.float32))
