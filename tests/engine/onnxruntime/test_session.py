"""The ONNX Runtime session: static buffers, refusals, and where weights are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from onnx import TensorProto
from torch import Tensor

from tests.reference.checkpoint import file_name, write_tensors
from trt_eagle3.engine.onnxruntime.session import OnnxRuntimeSession
from trt_eagle3.engine.runtime.session import Session, open_session
from trt_eagle3.errors import UserError
from trt_eagle3.graph.builder import GraphBuilder, ResolveLocation
from trt_eagle3.spec import StateSpec

SLOTS, WIDTH, PAGE_SIZE = 12, 4, 4


def attention_model(directory: Path) -> Path:
    """One TreeAttention, its caches named as in the target graph, and another output before
    them.
    """
    b = GraphBuilder("attention", "float32", str)
    real = [b.input(name, TensorProto.FLOAT, ("n", WIDTH)) for name in "qkv"]
    states = [StateSpec(f"{name}_cache.0", "paged", (1, WIDTH), "float32") for name in "kv"]
    caches = [b.state(state) for state in states]
    lengths = [
        b.input(name, TensorProto.INT32, ("batch",)) for name in ("past_lengths", "query_lengths")
    ]
    table = b.input("page_table", TensorProto.INT32, ("batch", "pages"))
    mask = b.input("tree_mask", TensorProto.BOOL, ("batch", "seq", "tail"))
    out, k_cache, v_cache = b.own_op(
        *("TreeAttention", *real, *caches, *lengths, table, mask),
        names=("out", "k_new", "v_new"),
        num_heads=1,
        num_kv_heads=1,
        page_size=PAGE_SIZE,
        scale=0.5,
    )
    b.output(out, "out", ("n", WIDTH))
    for state, updated in zip(states, (k_cache, v_cache), strict=True):
        b.update_state(state, updated)
    path = directory / "attention.onnx"
    path.write_bytes(b.build().SerializeToString())
    return path


def attention_inputs(past: int, new: int) -> dict[str, Tensor]:
    return {
        **{name: torch.randn(new, WIDTH) for name in "qkv"},
        "past_lengths": torch.tensor([past], dtype=torch.int32),
        "query_lengths": torch.tensor([new], dtype=torch.int32),
        "page_table": torch.tensor([[2, 1]], dtype=torch.int32),
        "tree_mask": torch.ones(1, new, new, dtype=torch.bool).tril(),
    }


@pytest.fixture
def session(tmp_path: Path) -> OnnxRuntimeSession:
    return OnnxRuntimeSession(attention_model(tmp_path), tmp_path)


def bind_caches(session: OnnxRuntimeSession) -> dict[str, Tensor]:
    caches = {name: torch.randn(SLOTS, 1, WIDTH) for name in "kv"}
    for name, cache in caches.items():
        session.bind(f"{name}_cache.0", cache)
        session.bind(f"{name}_cache_out.0", cache)
    return caches


def test_session_is_a_session(session: OnnxRuntimeSession) -> None:
    assert isinstance(session, Session)


def test_run_with_bound_caches_writes_the_new_rows_in_place_and_no_other(
    session: OnnxRuntimeSession,
) -> None:
    caches = bind_caches(session)
    before = {name: cache.clone() for name, cache in caches.items()}
    pointers = {name: cache.data_ptr() for name, cache in caches.items()}
    for past, slots in ((0, [8, 9, 10]), (3, [11, 4])):
        inputs = attention_inputs(past, len(slots))
        assert set(session.run(inputs)) == {"out"}
        for name, cache in caches.items():
            before[name][slots] = inputs[name][:, None]
            assert torch.equal(cache, before[name])
            assert cache.data_ptr() == pointers[name]


def test_run_without_bound_caches_returns_new_ones_and_leaves_the_inputs(
    session: OnnxRuntimeSession,
) -> None:
    caches = {f"{name}_cache.0": torch.zeros(SLOTS, 1, WIDTH) for name in "kv"}
    outputs = session.run({**attention_inputs(0, 2), **caches})
    assert set(outputs) == {"out", "k_cache_out.0", "v_cache_out.0"}
    assert outputs["k_cache_out.0"][8:10].abs().sum() > 0
    assert not any(cache.any() for cache in caches.values())


def test_bind_after_a_run_and_again_to_another_buffer_holds_for_the_next_run(
    session: OnnxRuntimeSession,
) -> None:
    inputs = attention_inputs(0, 2)
    free = {f"{name}_cache.0": torch.zeros(SLOTS, 1, WIDTH) for name in "kv"}
    first = session.run({**inputs, **free})
    old = bind_caches(session)
    kept = {name: cache.clone() for name, cache in old.items()}
    new = bind_caches(session)
    second = session.run(inputs)
    assert torch.equal(first["out"], second["out"])
    assert torch.equal(new["k"][8:10, 0], inputs["k"])
    assert torch.equal(new["v"][8:10, 0], inputs["v"])
    assert all(torch.equal(old[name], kept[name]) for name in old)


def test_outputs_of_one_run_survive_the_next(session: OnnxRuntimeSession) -> None:
    bind_caches(session)
    first = session.run(attention_inputs(0, 2))["out"]
    kept = first.clone()
    session.run(attention_inputs(2, 2))
    assert torch.equal(first, kept)


def test_run_takes_an_input_that_is_not_contiguous(session: OnnxRuntimeSession) -> None:
    bind_caches(session)
    inputs = attention_inputs(0, 3)
    expected = session.run(inputs)["out"]
    wide = torch.randn(3, 2 * WIDTH)
    wide[:, ::2] = inputs["q"]
    assert torch.equal(session.run({**inputs, "q": wide[:, ::2]})["out"], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": None}, r"^q: input not given$"),
        (
            {"speed": torch.zeros(1)},
            r"^speed: the graph has no such input; it has q, k, v, k_cache.0.*tree_mask$",
        ),
        (
            {"q": torch.zeros(2, WIDTH + 1)},
            r"^q: expected tensor\(float\) \['n', 4\], got torch.float32 \[2, 5\]$",
        ),
        ({"q": torch.zeros(1, 2, WIDTH)}, r"^q: expected .* got torch.float32 \[1, 2, 4\]$"),
        (
            {"past_lengths": torch.zeros(1, dtype=torch.int64)},
            r"^past_lengths: expected tensor\(int32\).* torch.int64",
        ),
        (
            {"tree_mask": torch.zeros(1, 2, 2)},
            r"^tree_mask: expected tensor\(bool\).* torch.float32",
        ),
    ],
    ids=["missing", "unknown", "width", "rank", "int64", "mask of floats"],
)
def test_run_refuses_a_wrong_input_in_one_line(
    session: OnnxRuntimeSession, change: Any, message: str
) -> None:
    bind_caches(session)
    inputs = {name: t for name, t in {**attention_inputs(0, 2), **change}.items() if t is not None}
    with pytest.raises(UserError, match=message) as error:
        session.run(inputs)
    assert "\n" not in str(error.value)
    assert set(session.run(attention_inputs(0, 2))) == {"out"}  # and the session still works


def test_run_refuses_an_input_that_has_a_static_buffer(session: OnnxRuntimeSession) -> None:
    bind_caches(session)
    with pytest.raises(UserError, match=r"k_cache.0: has a static buffer"):
        session.run({**attention_inputs(0, 2), "k_cache.0": torch.zeros(SLOTS, 1, WIDTH)})


def test_bind_refuses_a_name_that_the_graph_lacks(session: OnnxRuntimeSession) -> None:
    with pytest.raises(UserError, match=r"k_cache.9: the graph has no such input or output"):
        session.bind("k_cache.9", torch.zeros(1))


def linear_model(
    directory: Path, resolve: ResolveLocation, stored: torch.dtype = torch.float32
) -> tuple[Path, Tensor]:
    weight = torch.randn(3, WIDTH).to(stored)
    folder = directory / "weights"
    folder.mkdir(exist_ok=True)
    ref = write_tensors(folder / "w.safetensors", {"other": torch.randn(5), "w": weight})["w"]
    b = GraphBuilder("linear", "float32", resolve)
    b.output(b.linear(b.input("x", TensorProto.FLOAT, ("n", WIDTH)), [ref]), "y", ("n", 3))
    path = directory / "linear.onnx"
    path.write_bytes(b.build().SerializeToString())
    return path, weight.float()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("root", ["bundle", "slash"])
def test_weights_are_found_under_their_root(tmp_path: Path, root: str, stored: torch.dtype) -> None:
    def absolute(ref: Any) -> str:
        return str(ref.file.resolve()).lstrip("/")

    resolve = absolute if root == "slash" else lambda ref: f"weights/{file_name(ref)}"
    path, weight = linear_model(tmp_path, resolve, stored)
    session = open_session("onnxruntime", path, Path("/") if root == "slash" else tmp_path)
    x = torch.randn(2, WIDTH)
    torch.testing.assert_close(session.run({"x": x})["y"], x @ weight.T)


def test_missing_weight_file_is_one_line_that_names_the_model(tmp_path: Path) -> None:
    path, _ = linear_model(tmp_path, lambda ref: f"elsewhere/{file_name(ref)}")
    with pytest.raises(
        UserError, match=r"linear.onnx: ONNX Runtime cannot load it: .*Rebuild the bundle"
    ) as error:
        OnnxRuntimeSession(path, tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [None, b"", b"not a model"])
def test_damaged_model_is_one_line_that_names_it(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "model.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"model.onnx: ONNX Runtime cannot load it") as error:
        OnnxRuntimeSession(path, tmp_path)
    assert "\n" not in str(error.value)


def test_open_session_refuses_an_unknown_backend(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"engine.backend: expected one of onnxruntime, tensorrt, torch, got 'abacus'",
    ):
        open_session("abacus", tmp_path / "model.onnx", tmp_path)


def test_taps_are_returned_beside_the_outputs(tmp_path: Path) -> None:
    b = GraphBuilder("sum", "float32", str)
    x = b.input("x", TensorProto.FLOAT, ("n", 2))
    with b.scope("inner"):
        doubled = b.op("Add", x, x, name="doubled")
    b.output(b.op("Mul", doubled, doubled, name="squared"), "y", ("n", 2))
    (tmp_path / "sum.onnx").write_bytes(b.build().SerializeToString())
    session = open_session(
        "onnxruntime", tmp_path / "sum.onnx", tmp_path, intermediates=["inner.doubled"]
    )
    found = session.run({"x": torch.tensor([[1.0, 2.0]])})
    assert found["y"].tolist() == [[4.0, 16.0]]
    assert found["inner.doubled"].tolist() == [[2.0, 4.0]]
    with pytest.raises(UserError, match=r"no tensor inner\.tripled"):
        open_session(
            "onnxruntime", tmp_path / "sum.onnx", tmp_path, intermediates=["inner.tripled"]
        )
