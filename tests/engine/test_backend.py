"""The registry of backends, and that nobody but it and they know backends by name."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import trt_eagle3
from trt_eagle3.config import EngineConfig
from trt_eagle3.engine.backend import BACKENDS, all_backends, backend_named
from trt_eagle3.errors import UserError

PACKAGE = Path(trt_eagle3.__file__).parent
OWN = ("engine/backend.py", "engine/onnxruntime/", "engine/torch/", "engine/trt/")


def asked_names(source: str) -> list[str]:
    """Backend names that ``source`` compares with, matches, or has as keys of a table."""
    return [
        node.value
        for place in _places(ast.parse(source))
        for node in ast.walk(place)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in BACKENDS
    ]


def _places(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.MatchValue):
            yield node
        elif isinstance(node, ast.Dict):
            yield from (key for key in node.keys if key is not None)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get":
            yield from node.args[:1]


def test_backend_names_are_asked_for_in_their_own_rooms_only() -> None:
    files = [file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py")]
    elsewhere = [file for file in files if not file.as_posix().startswith(OWN)]
    assert len(elsewhere) > 100
    found = {str(f): asked_names((PACKAGE / f).read_text()) for f in elsewhere}
    # a section of the config is called as its backend
    own_section = {"bench/tensorrt.py", "bench/tensorrt_vision.py"}
    assert {f: names for f, names in found.items() if names and f not in own_section} == {}


@pytest.mark.parametrize(
    "source",
    [
        'x == "tensorrt"',
        'x in {"torch", "onnxruntime"}',
        '(a, b) != ("tensorrt", "float16")',
        '{"torch": 1}[x]',
        'versions.get("tensorrt")',
        'match x:\n    case "torch":\n        pass',
    ],
)
def test_names_that_are_asked_for_are_found(source: str) -> None:
    assert asked_names(source)
    assert not asked_names('open_session("torch"); EngineConfig(backend="tensorrt")')


def test_every_backend_is_called_as_its_key() -> None:
    assert [backend.name for backend in all_backends()] == list(BACKENDS)
    assert all(backend_named(name) is backend_named(name) for name in BACKENDS)
    with pytest.raises(UserError, match=r"engine\.backend: expected one of .*, got 'abacus'"):
        backend_named("abacus")


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_what_a_config_needs_is_among_the_requirements(backend: str) -> None:
    config = EngineConfig.model_validate({"backend": backend})
    assert backend_named(backend).requirement(config) in backend_named(backend).requirements()


def test_config_of_every_backend_is_checked_without_heavy_imports() -> None:
    program = f"""
import sys
from trt_eagle3.config import EngineConfig
for name in {list(BACKENDS)}:
    EngineConfig.model_validate({{"backend": name}})
print(*sorted({{"torch", "onnx", "onnxruntime", "tensorrt", "numpy"}} & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
