"""What a prompt's chunk leaves out of the last layer changes nothing that is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor

from tests.tiny import build_tiny
from trt_eagle3.engine.runtime.session import open_session
from trt_eagle3.engine.torch import session as session_module
from trt_eagle3.engine.torch.prompt_nodes import PROMPT_ATTENTION, prompt_nodes
from trt_eagle3.engine.torch.session import TorchSession
from trt_eagle3.graph.ops.silu_mul import silu_mul

RTOL = 3e-5  # float32 sums of other shapes, of the largest value
WIDTH, SLOTS = 40, 96
COUNTS = (WIDTH, 23)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("engines"))


def inputs_of(model: onnx.ModelProto, past: int) -> dict[str, Tensor]:
    """A chunk of two sequences, one of them shorter, over permuted pages."""
    torch.manual_seed(past)
    rows = torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril()
    found = {
        "position_ids": torch.randint(0, 500, (3, 2, WIDTH), dtype=torch.int32),
        "past_lengths": torch.tensor([past, 0], dtype=torch.int32),
        "query_lengths": torch.tensor(COUNTS, dtype=torch.int32),
        "page_table": torch.tensor([[3, 1, 5], [2, 4, 0]], dtype=torch.int32),
        "tree_mask": rows.expand(2, -1, -1).contiguous(),
        "logit_rows": torch.tensor([[n - 1] for n in COUNTS], dtype=torch.int32),
    }
    sizes = {"batch": 2, "seq": WIDTH, "slots": SLOTS}
    for value in model.graph.input:
        if value.name not in found:
            shape = [d.dim_value or sizes[d.dim_param] for d in value.type.tensor_type.shape.dim]
            cache = value.type.tensor_type.elem_type == onnx.TensorProto.UINT8
            found[value.name] = (
                torch.randint(0, 120, shape).to(torch.uint8) if cache else torch.randn(shape)
            )
    return found


def real(name: str, value: Tensor) -> Tensor:
    """What of an output means something: neither padding nor page 0, which takes its rows."""
    if name == "aux_hidden_states":
        return torch.cat([row[:count] for row, count in zip(value, COUNTS, strict=True)])
    return value[16:] if "cache_out" in name else value


@pytest.fixture(scope="module")
def fp8_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys and values are FP8."""
    return build_tiny(tmp_path_factory.mktemp("engines"), engine={"kv_dtype": "fp8"})


@pytest.mark.parametrize("past", [0, 7])
def test_run_prompt_over_an_fp8_cache_equals_the_whole_graph(fp8_bundle: Path, past: int) -> None:
    file = fp8_bundle / "target" / "model.onnx"
    inputs = inputs_of(onnx.load(file, load_external_data=False), past)
    session = open_session("torch", file, fp8_bundle)
    assert isinstance(session, TorchSession)
    outputs = session.run_prompt(inputs)
    assert session._prompt_steps is not None
    session._prompt_steps = None
    for name, want in session.run_prompt(inputs).items():
        got, want = real(name, outputs[name]).float(), real(name, want).float()
        assert torch.allclose(got, want, rtol=0, atol=RTOL * float(want.abs().max())), name


@pytest.mark.parametrize("past", [0, 7])
@pytest.mark.parametrize("graph", ["target", "draft"])
def test_run_prompt_of_the_torch_session_equals_onnxruntime(
    bundle: Path, graph: str, past: int
) -> None:
    file = bundle / graph / "model.onnx"
    inputs = inputs_of(onnx.load(file, load_external_data=False), past)
    expected = open_session("onnxruntime", file, bundle).run_prompt(inputs)
    found = open_session("torch", file, bundle)
    assert isinstance(found, TorchSession)
    assert found._prompt_steps is not None
    outputs = found.run_prompt(inputs)
    assert outputs.keys() == expected.keys()
    for name, want in expected.items():
        got, want = real(name, outputs[name]), real(name, want)
        assert got.shape == want.shape
        assert torch.allclose(got, want, rtol=0, atol=RTOL * float(want.abs().max())), name


@pytest.mark.gpu
@pytest.mark.parametrize("past", [0, 7])
@pytest.mark.parametrize("graph", ["target", "draft"])
def test_run_prompt_on_cuda_equals_the_cpu(
    bundle: Path, graph: str, past: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setitem(session_module._MIN_UNREAD_ROWS, "cuda", 1)
    file = bundle / graph / "model.onnx"
    inputs = inputs_of(onnx.load(file, load_external_data=False), past)
    expected = open_session("torch", file, bundle).run_prompt(inputs)
    outputs = open_session("torch", file, bundle, device="cuda").run_prompt(inputs)
    assert outputs.keys() == expected.keys()
    for name, want in expected.items():
        got, want = real(name, outputs[name].cpu()), real(name, want)
        assert torch.allclose(got, want, rtol=0, atol=1e-4 * float(want.abs().max())), name


def test_run_prompt_multiplies_the_picked_rows_alone_after_the_last_attention(
    bundle: Path,
) -> None:
    session = open_session("torch", bundle / "draft" / "model.onnx", bundle)
    assert isinstance(session, TorchSession)
    assert session._prompt_steps is not None
    seen: list[int] = []

    def counting(gate_up: Tensor) -> Tensor:
        seen.append(len(gate_up))
        return silu_mul(gate_up)

    session._prompt_steps = tuple(
        replace(step, function=counting) if step.function.__name__ == "silu_mul" else step
        for step in session._prompt_steps
    )
    file = bundle / "draft" / "model.onnx"
    session.run_prompt(inputs_of(onnx.load(file, load_external_data=False), 0))
    assert seen == [len(COUNTS)]


@pytest.mark.parametrize("wanted", ["layers.7.output", "layers.7.mlp.output"])
def test_prompt_nodes_of_a_graph_that_returns_all_rows_of_its_last_layer_are_none(
    bundle: Path, wanted: str
) -> None:
    model = onnx.load(bundle / "target" / "model.onnx", load_external_data=False)
    nodes, constants = model.graph.node, {i.name for i in model.graph.initializer}
    outputs = [o.name for o in model.graph.output]
    made = prompt_nodes(nodes, constants, outputs)
    assert made is not None
    assert [n.op_type for n in made].count(PROMPT_ATTENTION) == 1
    assert any(wanted in node.output for node in nodes)
    assert prompt_nodes(nodes, constants, [*outputs, wanted]) is None
