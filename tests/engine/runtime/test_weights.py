"""Materialised weights: their values bit for bit, shards, refusals, and what is only mapped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.weight_exprs import Case, cases
from trt_eagle3.dtype import COMPUTE_DTYPES, dtype_named
from trt_eagle3.engine.builder.weight_file import write_weights
from trt_eagle3.engine.runtime import weights
from trt_eagle3.engine.runtime.weights import materialise
from trt_eagle3.errors import UserError
from trt_eagle3.graph.trt_export import TrtExport
from trt_eagle3.graph.weight_slices import take_columns, take_rows
from trt_eagle3.graph.weights import WeightExpr, WeightPart

CHUNKS = st.sampled_from([1, 16, 100, 1 << 20])
FLOAT32 = dtype_named("float32")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@given(case=cases(), chunk=CHUNKS)
@settings(max_examples=80, deadline=None)
def test_materialise_any_expression_is_float64_rounded_once(
    root: Path, case: Case, chunk: int
) -> None:
    case.write(root)
    with mock.patch.object(weights, "_CHUNK_BYTES", chunk):
        made = materialise(case.expr, root, case.expr.dtype)
    assert made.shape == case.expr.shape
    assert torch.equal(made, case.expected())


@given(case=cases(), chunk=CHUNKS, data=st.data())
@settings(max_examples=80, deadline=None)
def test_slices_of_any_expression_are_slices_of_its_values(
    root: Path, case: Case, chunk: int, data: st.DataObject
) -> None:
    case.write(root)
    rows, columns = case.expr.shape
    ranges = [data.draw(taken_of(rows)) for _ in range(data.draw(st.integers(1, 3)))]
    first, end = data.draw(taken_of(columns))
    expr = take_columns(take_rows(case.expr, ranges), (first, end))
    with mock.patch.object(weights, "_CHUNK_BYTES", chunk):
        made = materialise(expr, root, expr.dtype)
    expected = torch.cat([case.expected()[slice(*taken)] for taken in ranges])[:, first:end]
    assert made.shape == expr.shape
    assert torch.equal(made, expected)


def taken_of(size: int) -> st.SearchStrategy[tuple[int, int]]:
    """Ranges of a dimension."""
    ends = st.tuples(st.integers(0, size - 1), st.integers(1, size))
    return ends.map(lambda pair: (min(pair[0], pair[1] - 1), max(pair[0] + 1, pair[1])))


@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_written_weights_are_the_materialised_bytes(root: Path, case: Case) -> None:
    case.write(root)
    ready = TrtExport(onnx.ModelProto(), {"w": 256}, {"w": case.expr})
    write_weights(ready, root, root / "weights.bin")
    raw = np.fromfile(root / "weights.bin", dtype=np.uint8, offset=256)
    written = torch.from_numpy(raw).view(case.expr.dtype.torch).view(case.expr.shape)
    assert torch.equal(written, case.expected())


def fused(root: Path) -> Case:
    """Three parts, of which one is transposed and one scaled; rows of one only."""
    stored = tuple(torch.randn(4, 4).bfloat16() for _ in range(3))
    dtype = dtype_named("bfloat16")
    parts = [WeightPart(f"t{i}", "w.raw", 32 * i, 32, dtype, (4, 4)) for i in range(3)]
    parts[1] = dataclasses.replace(parts[1], transpose=True)
    parts[2] = dataclasses.replace(parts[2], scale=1 / 64, rows=(1, 3))
    case = Case(WeightExpr(tuple(parts), FLOAT32), stored)
    case.write(root)
    return case


Parts = tuple[WeightPart, ...]
FAULTS: dict[str, Callable[[Parts], Parts]] = {
    "parts swapped": lambda p: (p[1], p[0], p[2]),
    "transpose forgotten": lambda p: (p[0], dataclasses.replace(p[1], transpose=False), p[2]),
    "scale twice": lambda p: (*p[:2], dataclasses.replace(p[2], scale=p[2].scale ** 2)),
    "other rows": lambda p: (*p[:2], dataclasses.replace(p[2], rows=(0, 2))),
    "other bytes": lambda p: (dataclasses.replace(p[0], offset=2), *p[1:]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_materialise_planted_fault_changes_the_weight(root: Path, fault: str) -> None:
    case = fused(root)
    assert torch.equal(materialise(case.expr, root, FLOAT32), case.expected())
    faulty = dataclasses.replace(case.expr, parts=FAULTS[fault](case.expr.parts))
    assert not torch.equal(materialise(faulty, root, FLOAT32), case.expected())


def single(root: Path, value: float, stored: str = "bfloat16", scale: float = 1.0) -> WeightPart:
    dtype = dtype_named(stored)
    tensor = torch.zeros(5, 3, dtype=dtype.torch)
    tensor[4, 2] = value
    (root / "one.raw").write_bytes(tensor.view(torch.uint8).numpy().tobytes())
    size = dtype.num_bytes(15)
    return WeightPart("layers.0.w", "one.raw", 0, size, dtype, (5, 3), scale=scale)


@pytest.mark.parametrize(
    ("value", "scale", "refusal"),
    [
        (1e5, 1.0, "layers.0.w holds 99840, which is no float16 value: float16 ends at 65504"),
        (1e5, 1 / 64, None),
        (1e4, 64.0, "layers.0.w holds 9984, which is no float16 value"),
        (float("nan"), 1.0, "damaged"),
        (float("-inf"), 1.0, "damaged"),
    ],
)
def test_materialise_value_beyond_the_type_is_refused_by_name(
    root: Path, value: float, scale: float, refusal: str | None
) -> None:
    float16 = dtype_named("float16")
    expr = WeightExpr((single(root, value, scale=scale),), float16)
    if refusal is None:
        assert float(materialise(expr, root, float16).max()) == value_of(value) * scale
        return
    with pytest.raises(UserError, match=refusal):
        materialise(expr, root, float16)


def value_of(value: float) -> float:
    return float(torch.tensor(value).bfloat16())


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Iterator[bytearray]:
        raise AssertionError("read")

    monkeypatch.setattr(weights, "read_chunks", refuse)


@pytest.mark.usefixtures("no_reading")
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES, ids=str)
def test_materialise_stored_weight_is_mapped_and_not_read(root: Path, dtype: object) -> None:
    part = single(root, 3.0, str(dtype))
    made = materialise(WeightExpr((part,), part.dtype), root, part.dtype)
    assert float(made[4, 2]) == 3.0
    made[4, 2] = 1.0  # a private copy of the page: the file keeps its value
    again = materialise(WeightExpr((part,), part.dtype), root, part.dtype)
    assert float(again[4, 2]) == 3.0


def test_slice_of_rows_reads_its_own_bytes_alone(root: Path) -> None:
    part = dataclasses.replace(single(root, 1.0), rows=(1, 5))
    expr = take_rows(WeightExpr((part,), FLOAT32), [(2, 4)])
    with mock.patch.object(weights, "read_chunks", wraps=weights.read_chunks) as read:
        materialise(expr, root, FLOAT32)
    (_, _, offset, _), *others = (call.args for call in read.call_args_list)
    assert (offset, others) == (3 * 6, [])


@pytest.mark.parametrize(("size", "message"), [(20, "cut short"), (None, "cannot read layers.0.w")])
def test_materialise_file_cut_short_or_gone_is_refused(
    root: Path, size: int | None, message: str
) -> None:
    part = single(root, 1.0)
    file = root / "one.raw"
    file.write_bytes(file.read_bytes()[:size])
    if size is None:
        file.unlink()
    with pytest.raises(UserError, match=message):
        materialise(WeightExpr((part,), FLOAT32), root, FLOAT32)
