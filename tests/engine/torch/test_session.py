"""The torch session computes what ONNX Runtime computes, on every graph of the tiny pair."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor

import trt_eagle3
from tests.reference.checkpoint import file_name, write_tensors
from tests.tiny import build_tiny
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine import capi
from trt_eagle3.engine.bundle.read import read_bundle
from trt_eagle3.engine.runtime.session import Reduction, Session, open_session
from trt_eagle3.engine.torch import program as torch_program
from trt_eagle3.engine.torch.ops import STANDARD_OPS, Function
from trt_eagle3.engine.torch.session import TorchSession
from trt_eagle3.errors import UserError
from trt_eagle3.families.qwen3_vl.vision_rows import vision_rows
from trt_eagle3.graph.builder import GraphBuilder
from trt_eagle3.graph.ops import EVERY_OP, OPS

# Both sides sum in float32, in other orders: a few units in the last place of the largest value
# after 8 layers.
RTOL = 3e-5
ROWS = 21
SLOTS = 64


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("engines"))


def context(rows: int = ROWS) -> dict[str, Tensor]:
    """A prompt of two batch rows, one of them shorter, over permuted pages."""
    mask = torch.ones(rows, rows, dtype=torch.bool).tril().expand(2, -1, -1).contiguous()
    return {
        "position_ids": torch.randint(0, 500, (3, 2, rows), dtype=torch.int32),
        "past_lengths": torch.tensor([0, 0], dtype=torch.int32),
        "query_lengths": torch.tensor([rows, 9], dtype=torch.int32),
        "page_table": torch.tensor([[3, 1], [2, 0]], dtype=torch.int32),
        "tree_mask": mask,
        "logit_rows": torch.tensor([[0, rows - 1], [3, 5]], dtype=torch.int32),
    }


def inputs_of(graph: str, model: onnx.ModelProto) -> dict[str, Tensor]:
    torch.manual_seed(0)
    if graph == "fuse":
        return {"aux_hidden_states": torch.randn(ROWS, 3 * 256)}
    if graph == "vision":
        grid = torch.tensor([[1, 4, 6], [2, 2, 8]])
        return {
            "patches": torch.randn(int(grid.prod(1).sum()), 1536),
            **vision_rows(grid, 2, 8).inputs(),
        }
    found = context()
    for value in model.graph.input:
        if value.name not in found:
            sizes = {"batch": 2, "seq": ROWS, "slots": SLOTS}
            shape = [d.dim_value or sizes[d.dim_param] for d in value.type.tensor_type.shape.dim]
            found[value.name] = torch.randn(shape)
    return found


def differ(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], real: int = 9) -> list[str]:
    """Names of outputs that are not equal within RTOL; padding rows of the second batch row mean
    nothing.
    """
    names = []
    for name, want in expected.items():
        got = found[name]
        if name in {"aux_hidden_states", "features_out"}:
            want, got = (torch.cat([t[0], t[1, :real]]) for t in (want, got))
        if name.split(".")[0] in {"k_cache_out", "v_cache_out"}:
            want, got = want[16:], got[16:]  # page 0 takes the padding
        if not torch.allclose(got, want, rtol=0, atol=RTOL * float(want.abs().max())):
            names.append(name)
    return names


@pytest.mark.parametrize("graph", ["target", "draft", "fuse", "vision"])
def test_every_graph_equals_onnxruntime(bundle: Path, graph: str) -> None:
    file = bundle / graph / "model.onnx"
    inputs = inputs_of(graph, onnx.load(file, load_external_data=False))
    expected = open_session("onnxruntime", file, bundle).run(inputs)
    found = open_session("torch", file, bundle).run(inputs)
    assert found.keys() == expected.keys()
    assert differ(found, expected) == []


def test_a_fault_in_one_op_shows(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails when it should: rope off by one position."""
    file = bundle / "target" / "model.onnx"
    inputs = inputs_of("target", onnx.load(file, load_external_data=False))
    expected = open_session("onnxruntime", file, bundle).run(inputs)
    rope = OPS["QKNormMRope"].torch_function
    faulty = {
        **torch_program._own_ops("cpu"),
        "QKNormMRope": lambda qkv, ids, *rest, **kw: rope(qkv, ids + (ids > 7), *rest, **kw),
    }
    monkeypatch.setattr("trt_eagle3.engine.torch.program._own_ops", lambda _: faulty)
    assert "logits" in differ(open_session("torch", file, bundle).run(inputs), expected)


def test_bound_caches_are_written_in_place_and_unbound_ones_are_not(bundle: Path) -> None:
    file = bundle / "draft" / "model.onnx"
    inputs = inputs_of("draft", onnx.load(file, load_external_data=False))
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    session: Session = open_session("torch", file, bundle)
    free = session.run(inputs)
    assert all(torch.equal(inputs[name], before[name]) for name in inputs)
    caches = {name: inputs.pop(name) for name in list(inputs) if "cache" in name}
    for name, cache in caches.items():
        session.bind(name, cache)
        session.bind(name.replace("cache.", "cache_out."), cache)
    found = session.run(inputs)
    assert set(found) == {"logits", "features_out"}
    assert all(torch.equal(caches[n], free[n.replace("cache.", "cache_out.")]) for n in caches)


def test_inputs_may_have_any_strides_and_reach_the_ops_contiguous(bundle: Path) -> None:
    file = bundle / "target" / "model.onnx"
    inputs = inputs_of("target", onnx.load(file, load_external_data=False))
    inputs["position_ids"] = inputs["position_ids"][:1].expand(3, -1, -1)
    assert not inputs["position_ids"].is_contiguous()
    seen: list[bool] = []

    def watched(function: Function) -> Function:
        def call(*tensors: Tensor, **attributes: Any) -> Any:
            seen.extend(t.is_contiguous() for t in tensors)
            return function(*tensors, **attributes)

        return call

    session = TorchSession(file, bundle)
    own = OPS["QKNormMRope"].torch_function
    session._steps = tuple(
        dataclasses.replace(step, function=watched(own)) if step.function is own else step
        for step in session._steps
    )
    assert differ(session.run(inputs), open_session("onnxruntime", file, bundle).run(inputs)) == []
    assert seen
    assert all(seen)


def test_any_tensor_can_be_asked_for(bundle: Path) -> None:
    file = bundle / "target" / "model.onnx"
    intermediates = ["layers.0.output_pre_deepstack", "layers.5.output"]
    inputs = inputs_of("target", onnx.load(file, load_external_data=False))
    sessions = [
        open_session(backend, file, bundle, intermediates) for backend in ("torch", "onnxruntime")
    ]
    found, expected = (session.run(inputs) for session in sessions)
    rows = torch.cat([torch.arange(ROWS), ROWS + torch.arange(9)])
    for name in intermediates:
        assert differ({name: found[name][rows]}, {name: expected[name][rows]}) == []


def test_table_knows_every_standard_op_of_the_graphs(bundle: Path) -> None:
    used = set()
    for graph in ("target", "draft", "fuse", "vision"):
        proto = onnx.load(bundle / graph / "model.onnx", load_external_data=False)
        used |= {node.op_type for node in proto.graph.node if not node.domain}
    assert used <= set(STANDARD_OPS)


def test_without_the_kernel_library_cuda_runs_stock_operations_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = torch_program._own_ops.__wrapped__, torch_program._standard_ops.__wrapped__
    monkeypatch.setattr(torch_program, "_own_ops", functools.cache(found[0]))
    monkeypatch.setattr(torch_program, "_standard_ops", functools.cache(found[1]))
    monkeypatch.setattr(capi, "available", lambda: False)
    with pytest.warns(UserWarning, match=f"install-kernels.*{capi.LIBRARY_VARIABLE}") as told:
        ops = [torch_program._own_ops("cuda") for _ in range(3)]
    assert len(told) == 1
    stock = {name for name, op in torch_program._own_ops("cpu").items() if op is ops[0][name]}
    assert stock == set(EVERY_OP)
    assert all(some == ops[0] for some in ops)
    assert torch_program._standard_ops("cuda") is STANDARD_OPS


def test_decoding_gives_the_tokens_of_onnxruntime(bundle: Path, tmp_path: Path) -> None:
    other = trt_eagle3.load(build_tiny(tmp_path, engine={"backend": "torch"}))
    prompt = "Sort these numbers: 7 3 9 1."
    expected = trt_eagle3.load(bundle).generate(prompt, max_tokens=24)
    found = other.generate(prompt, max_tokens=24)
    assert found.token_ids == expected.token_ids
    assert found.accepted_lengths == expected.accepted_lengths


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"aux_hidden_states": None}, "aux_hidden_states: input not given"),
        (
            {"aux_hidden_states": torch.zeros(3, 5)},
            r"aux_hidden_states: expected torch.float32 \['tokens', 768\], got",
        ),
        ({"aux_hidden_states": torch.zeros(3, 768).half()}, "got torch.float16"),
        ({"extra": torch.zeros(1)}, "extra: the graph has no such input"),
    ],
)
def test_wrong_inputs_are_refused_in_one_line(
    bundle: Path, change: dict[str, Tensor | None], message: str
) -> None:
    session = TorchSession(bundle / "fuse" / "model.onnx", bundle)
    inputs = {"aux_hidden_states": torch.zeros(3, 768), **change}
    with pytest.raises(UserError, match=message) as caught:
        session.run({name: tensor for name, tensor in inputs.items() if tensor is not None})
    assert "\n" not in str(caught.value)


@pytest.mark.gpu
def test_a_thread_that_has_multiplied_nothing_yet_captures(bundle: Path) -> None:
    """A thread's first product makes its cuBLAS handle, which a capture does not survive."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    session = TorchSession(bundle / "fuse" / "model.onnx", bundle, device="cuda")
    inputs = {"aux_hidden_states": torch.randn(ROWS, 3 * 256)}
    eager = [session.run(inputs)["features"].cpu() for _ in range(2)]
    with ThreadPoolExecutor(1) as thread:
        captured = thread.submit(session.run, inputs).result()["features"].cpu()
    assert torch.allclose(captured, eager[0], rtol=0, atol=RTOL * float(eager[0].abs().max()))


def test_missing_weights_are_one_line(bundle: Path, tmp_path: Path) -> None:
    assert read_bundle(bundle)
    with pytest.raises(UserError, match=r"model\.safetensors: cannot (map|read)"):
        TorchSession(bundle / "fuse" / "model.onnx", tmp_path)


def test_weight_beyond_float16_is_refused_with_its_tensor(tmp_path: Path) -> None:
    weight = torch.full((2, 4), 1e5).bfloat16()
    ref = write_tensors(tmp_path / "w.safetensors", {"head": weight})["head"]
    for dtype, fits in (("bfloat16", True), ("float16", False)):
        b = GraphBuilder("product", dtype, file_name)
        x = b.input("x", dtype_named(dtype).onnx, ("n", 4))
        b.output(b.linear(x, [ref]), "y", ("n", 2))
        (tmp_path / "model.onnx").write_bytes(b.build().SerializeToString())
        if fits:
            TorchSession(tmp_path / "model.onnx", tmp_path)
            continue
        with pytest.raises(
            UserError, match=r"w.safetensors: head holds 99840, which is no float16"
        ):
            TorchSession(tmp_path / "model.onnx", tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reduced_output_is_what_the_function_makes_of_it(tmp_path: Path, dtype: str) -> None:
    """Of logits that were not widened; the other outputs are as ever."""
    bundle = build_tiny(tmp_path, engine={"backend": "torch", "dtype": dtype})
    file = bundle / "draft" / "model.onnx"
    session = TorchSession(file, bundle)
    drawn = inputs_of("draft", onnx.load(file, load_external_data=False))
    compute = getattr(torch, dtype)
    inputs = {n: t.to(compute) if t.is_floating_point() else t for n, t in drawn.items()}
    seen: list[torch.dtype] = []

    def best(logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.dtype)
        return logits.argmax(dim=-1)

    whole, reduced = (
        session.run(inputs),
        session.run_reduced(inputs, {"logits": Reduction("best", best)}),
    )
    assert torch.equal(reduced.pop("logits"), whole.pop("logits").argmax(dim=-1))
    assert seen == [compute]
    assert set(reduced) == set(whole)
    for name, tensor in reduced.items():
        assert torch.equal(tensor, whole[name]), name
