"""What an op declares fits together: names, types, lowerings, and the calls of its kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from onnx import TensorProto
from torch import Tensor

from tests.graph.ops.gated_delta_case import make_case
from trt_eagle3.engine import capi
from trt_eagle3.engine.capi.structs import arguments_of
from trt_eagle3.graph import ops
from trt_eagle3.graph.ops import EVERY_OP, OPS
from trt_eagle3.graph.ops.tree_attention import tree_attention_call

HALF, FLOAT, INT32 = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.INT32

ROPE = {
    "position_ids": torch.zeros(3, 2, 3, dtype=torch.int32),
    "inv_freq": torch.ones(4),
    "pair_axis": torch.zeros(4, dtype=torch.int32),
}
NODES = {
    "AddRmsNorm": (
        {"x": torch.ones(2, 8), "weight": torch.ones(8), "residual": torch.ones(2, 8)},
        {"epsilon": 1e-6},
    ),
    "QKNormMRope": (
        {"qkv": torch.ones(6, 32), **ROPE, "q_norm": torch.ones(8), "k_norm": torch.ones(8)},
        {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "epsilon": 1e-6},
    ),
    "TreeAttention": (
        {
            "q": torch.ones(6, 16),
            **{name: torch.ones(6, 8) for name in "kv"},
            **{f"{name}_cache": torch.zeros(32, 1, 8) for name in "kv"},
            "past_lengths": torch.zeros(2, dtype=torch.int32),
            "query_lengths": torch.full((2,), 3, dtype=torch.int32),
            "page_table": torch.arange(2, dtype=torch.int32)[:, None],
            "tree_mask": torch.ones(2, 3, 3, dtype=torch.bool),
        },
        {"num_heads": 2, "num_kv_heads": 1, "page_size": 16, "scale": 0.5},
    ),
    "GatedDelta": (
        {name: x.clone() for name, x in make_case([[-1, 0]], [1], (1, 2), 4, 0).inputs.items()},
        {"num_k_heads": 1, "num_v_heads": 2, "epsilon": 1e-6},
    ),
    "SiluMul": ({"gate_up": torch.ones(2, 8)}, {}),
    "VisionAttention": (
        {
            "qkv": torch.ones(6, 48),
            "rope_positions": torch.zeros(2, 6, dtype=torch.int32),
            **{name: ROPE[name] for name in ("inv_freq", "pair_axis")},
            "frame_starts": torch.tensor([0, 2, 6], dtype=torch.int32),
        },
        {"num_heads": 2, "scale": 0.5},
    ),
}


@pytest.mark.parametrize("op_type", EVERY_OP)
def test_op_is_declared_in_the_file_of_its_name(op_type: str) -> None:
    op = EVERY_OP[op_type]
    assert op.plugin == op_type
    assert Path(ops.__path__[0], f"{op.name}.py").is_file()
    assert op.kernel is None or op.kernel.name == op.name
    assert op.kernel is None or set(op.kernel.writes) <= set(op.kernel.tensors)


@pytest.mark.parametrize("op_type", EVERY_OP)
def test_op_has_every_overload_in_every_lowering(op_type: str) -> None:
    op = EVERY_OP[op_type]
    for overload, inputs in op.inputs.items():
        assert op.inputs[op.overload(len(inputs))] == inputs
        assert tuple(op.function(overload).input) == inputs
        lowered = op.function_17(overload, "lowered", HALF)
        assert (tuple(lowered.input), tuple(lowered.output)) == (inputs, op.outputs[overload])
        assert lowered.opset_import[0].version == 17


def test_output_has_the_type_of_the_input_with_its_variable() -> None:
    norm, rope = OPS["AddRmsNorm"], OPS["QKNormMRope"]
    assert norm.output_types([HALF, HALF, FLOAT], HALF) == [HALF, FLOAT]
    assert norm.output_types([FLOAT, HALF], HALF) == [HALF]
    assert rope.output_types([HALF, INT32, FLOAT, INT32], HALF) == [HALF, HALF, HALF]


def test_every_kernel_of_an_op_has_a_case_here() -> None:
    assert set(NODES) == {name for name, op in OPS.items() if op.kernel_call}


@pytest.mark.parametrize("op_type", NODES)
def test_kernel_call_of_a_node_fills_the_kernels_arguments(op_type: str) -> None:
    """Names are the kernel's, inputs and attributes arrive, results are what torch would return."""
    op, (inputs, attributes) = OPS[op_type], NODES[op_type]
    assert op.kernel_call is not None
    call = op.kernel_call(*inputs.values(), **attributes)
    assert call.kernel is op.kernel
    assert set(call.tensors) == set(call.kernel.tensors)
    assert all(call.tensors[name] is tensor for name, tensor in inputs.items())
    arguments = arguments_of(call)
    for name in attributes.keys() & call.kernel.scalars.keys():
        assert getattr(arguments, name) == pytest.approx(attributes[name])
    for name, tensor in call.tensors.items():
        if tensor is not None:
            held = getattr(arguments, name)
            assert (held.data, held.shape[: held.rank]) == (tensor.data_ptr(), [*tensor.shape])
    expected = op.torch_function(*inputs.values(), **attributes)
    assert shapes(call.result) == shapes(expected)


def shapes(result: Tensor | tuple[Tensor, ...]) -> list[torch.Size]:
    return [t.shape for t in (result if isinstance(result, tuple) else (result,))]


def test_norm_of_a_node_without_residual_has_one_output() -> None:
    op = OPS["AddRmsNorm"]
    assert op.kernel_call is not None
    call = op.kernel_call(torch.ones(2, 8), torch.ones(8), epsilon=1e-6)
    assert isinstance(call.result, Tensor)


def test_causal_attention_gives_the_masks_shape_and_no_data() -> None:
    inputs = dict(NODES["TreeAttention"][0])
    del inputs["tree_mask"]
    call = tree_attention_call(*inputs.values(), None, page_size=16, scale=0.5, tail=5)
    arguments = arguments_of(call)
    assert (arguments.mask, arguments.tree_mask.data) == (1, None)
    assert list(arguments.tree_mask.shape[:3]) == [2, 3, 5]


def test_launch_refuses_tensors_of_the_cpu() -> None:
    with pytest.raises(ValueError, match="CUDA device"):
        capi.tree_attention(*NODES["TreeAttention"][0].values(), page_size=16, scale=0.5)


def test_ops_are_imported_without_torch() -> None:
    code = "import sys, trt_eagle3.graph.ops; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
