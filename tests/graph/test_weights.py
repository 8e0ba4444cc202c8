"""Weight expressions as a model's metadata, and what none may be."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from hypothesis import given, settings

from tests.weight_exprs import Case, cases
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.dtype import dtype_named
from trt_eagle3.errors import UserError
from trt_eagle3.graph.weight_formats import format_of
from trt_eagle3.graph.weights import (
    METADATA_KEY,
    WeightExpr,
    WeightPart,
    descriptions,
    external_weights,
    weight_initializer,
    write_descriptions,
)

BF16, F16 = dtype_named("bfloat16"), dtype_named("float16")


def part(**changes: object) -> WeightPart:
    whole = {"name": "t", "location": "w.safetensors", "offset": 8, "num_bytes": 24}
    fields: dict[str, object] = {**whole, "dtype": BF16, "shape": (4, 3), **changes}
    return WeightPart(**fields)  # type: ignore[arg-type]


def model_of(weights: dict[str, WeightExpr]) -> onnx.ModelProto:
    initializers = [weight_initializer(name, expr) for name, expr in weights.items()]
    model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], initializers))
    write_descriptions(model, weights)
    return model


@given(cases())
@settings(max_examples=60, deadline=None)
def test_expression_in_a_models_metadata_is_read_back(case: Case) -> None:
    stored = WeightExpr((part(),), BF16)
    model = model_of({"w": case.expr, "stored": stored})
    expected = {"w": case.expr} if not case.expr.is_stored else {}
    assert descriptions(model) == expected
    found = external_weights(model)["w"]
    assert (found.shape, found.dtype) == (case.expr.shape, case.expr.dtype)
    assert external_weights(model)["stored"].parts[0].offset == 8


@pytest.mark.parametrize(
    ("changes", "dtype", "stored"),
    [
        ({}, BF16, True),
        ({"rows": (0, 4)}, BF16, True),
        ({}, F16, False),
        ({"scale": 0.5}, BF16, False),
        ({"rows": (0, 3)}, BF16, False),
        ({"transpose": True}, BF16, False),
    ],
)
def test_whole_tensor_of_its_type_alone_is_external_data(
    changes: dict[str, object], dtype: object, stored: bool
) -> None:
    expr = WeightExpr((part(**changes),), dtype)  # type: ignore[arg-type]
    model = model_of({"w": expr})
    entries = {e.key: e.value for e in model.graph.initializer[0].external_data}
    place = {"location": "w.safetensors", "offset": "8", "length": "24"}
    assert (entries == place) == stored
    assert bool(model.metadata_props) != stored


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bytes": 8}, "do not make 8 bytes"),
        ({"shape": ()}, "do not make"),
        ({"shape": (-4, -3)}, "do not make"),
        ({"rows": (3, 2)}, "rows 3 to 2 are not in shape"),
        ({"rows": (0, 5)}, "rows 0 to 5 are not in shape"),
        ({"shape": (2, 2, 3), "transpose": True}, "no two axes"),
        ({"scale": float("nan")}, "is no factor"),
        ({"scale": 0.0}, "is no factor"),
    ],
)
def test_part_that_describes_no_tensor_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        part(**changes)


@pytest.mark.parametrize("parts", [(), (part(), part(shape=(3, 4)))])
def test_parts_that_cannot_be_stacked_are_refused(parts: tuple[WeightPart, ...]) -> None:
    with pytest.raises(ValueError, match="cannot be stacked"):
        WeightExpr(parts, BF16)


@pytest.mark.parametrize("text", ["", "[]", '{"w": {}}', '{"w": {"parts": [{}], "dtype": "F16"}}'])
def test_metadata_that_are_no_descriptions_are_refused_in_one_line(text: str) -> None:
    model = onnx.ModelProto()
    model.metadata_props.add(key=METADATA_KEY, value=text)
    with pytest.raises(UserError, match=f"^metadata {METADATA_KEY}: ") as caught:
        descriptions(model)
    assert "\n" not in str(caught.value)


def test_initializer_that_is_not_described_is_refused_by_name() -> None:
    model = model_of({"w": WeightExpr((part(scale=0.5),), BF16)})
    del model.metadata_props[:]
    with pytest.raises(UserError, match=r"^w: metadata .* does not describe it"):
        external_weights(model)


def ref(dtype: str) -> TensorRef:
    return TensorRef(f"w.{dtype}", Path("w.safetensors"), 0, 4, dtype, (4,))


def test_format_of_tensors_that_are_no_numbers_is_refused() -> None:
    assert format_of([ref("BF16"), ref("F32")]) == "dense"
    with pytest.raises(UserError, match=r"expected a float32, float16 or bfloat16 tensor, got I64"):
        format_of([ref("I64")])
