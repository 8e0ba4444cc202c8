"""One table of element types: every library agrees with it, and the package has no other."""

import ast
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch
from onnx import helper
from safetensors.torch import _TYPES as SAFETENSORS_TYPES

import trt_eagle3
from trt_eagle3.dtype import (
    DTYPES,
    DType,
    dtype_named,
    dtype_of_onnx,
    dtype_of_safetensors,
    dtype_of_tensorrt,
    dtype_of_torch,
)
from trt_eagle3.errors import UserError

PACKAGE = Path(trt_eagle3.__file__).parent
EACH = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@EACH
def test_dtype_columns_find_the_same_row(dtype: DType) -> None:
    assert dtype_named(dtype.name) is dtype
    assert dtype_of_onnx(dtype.onnx) is dtype
    assert dtype_of_safetensors(dtype.safetensors) is dtype
    assert dtype_of_torch(dtype.torch) is dtype
    if dtype.tensorrt:
        assert dtype_of_tensorrt(dtype.tensorrt) is dtype


@EACH
def test_dtype_bits_are_torchs(dtype: DType) -> None:
    assert dtype.num_bytes(3) == 3 * dtype.torch.itemsize


@EACH
def test_dtype_onnx_enum_is_onnxs_own_of_that_name(dtype: DType) -> None:
    assert helper.tensor_dtype_to_np_dtype(dtype.onnx).name == dtype.name
    assert dtype.onnx in onnx.TensorProto.DataType.values()


@EACH
def test_dtype_safetensors_spelling_is_the_librarys(dtype: DType) -> None:
    if dtype.safetensors in SAFETENSORS_TYPES:
        assert SAFETENSORS_TYPES[dtype.safetensors] == dtype.torch


def test_dtype_names_are_unique_in_every_column() -> None:
    columns = zip(*((d.name, d.onnx, d.safetensors) for d in DTYPES), strict=True)
    assert all(len(set(column)) == len(DTYPES) for column in columns)


def test_num_bytes_of_half_bytes_fills_up_the_last() -> None:
    assert [DType("int4", 22, "I4", 4).num_bytes(count) for count in (0, 1, 2, 3)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("look_up", "unknown"),
    [
        (dtype_named, "half"),
        (dtype_of_onnx, 0),
        (dtype_of_safetensors, "BF61"),
        (dtype_of_tensorrt, "FLOAT16"),
        (dtype_of_torch, torch.complex64),
    ],
)
def test_lookup_unknown_type_is_refused_with_what_is_known(look_up, unknown) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=r"expected an element type \(.+\), got"):
        look_up(unknown)


def test_import_dtype_loads_neither_torch_nor_onnx() -> None:
    program = "import sys, trt_eagle3.dtype; print({'torch', 'onnx', 'numpy'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "set()"


def second_tables(source: str) -> list[int]:
    """Lines of dicts that map to or from float16 and bfloat16 by a name or a library's symbol.

    Tolerances, which map to numbers that are no sizes, and calls are none.
    """
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Dict) and is_type_table(node)
    ]


def is_type_table(node: ast.Dict) -> bool:
    tolerances = all(isinstance(v, ast.Constant) and type(v.value) is float for v in node.values)
    sides = (node.keys, node.values)
    return not tolerances and any(
        {symbol(item) for item in side} >= spellings for side in sides for spellings in TABLES
    )


TABLES = (
    {"float16", "bfloat16"},
    {"torch.float16", "torch.bfloat16"},
    {"F16", "BF16"},
    {"FLOAT16", "BFLOAT16"},
    {"HALF", "BF16"},
    {"float32", "int64"},
    {"F32", "I64"},
    {"FLOAT", "INT64"},
    {"BF16", "F32"},
)


def symbol(item: ast.expr | None) -> str:
    """A constant's text; the last name of ``torch.float16`` or ``TensorProto.FLOAT16``."""
    if isinstance(item, ast.Constant):
        return str(item.value)
    return item.attr if isinstance(item, ast.Attribute) else ""


def test_package_has_no_second_table_of_types() -> None:
    found = {
        f"{file.relative_to(PACKAGE)}:{line}"
        for file in PACKAGE.rglob("*.py")
        for line in second_tables(file.read_text())
    }
    assert found == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('{"F16": torch.float16, "BF16": torch.bfloat16}', [1]),
        ("{TensorProto.FLOAT16: 2, TensorProto.BFLOAT16: 2}", [1]),
        ('{"float32": 4, "float16": 2, "bfloat16": 2}', [1]),
        ('{"float32": 2e-5, "float16": 1e-2, "bfloat16": 7e-2}', []),
        ('{"int64": "I64", "float32": "F32"}', [1]),
    ],
)
def test_second_tables_finds_tables_and_leaves_tolerances(source: str, found: list[int]) -> None:
    assert second_tables(source) == found
