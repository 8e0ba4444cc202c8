"""The registry of backends, and that nobody but it and they know backends by name."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import trt_eagle3
from tests.tiny import build_tiny
from trt_eagle3.backend_support import SUPPORT
from trt_eagle3.commands.doctor import check_bundle, diagnose
from trt_eagle3.config import EngineConfig, config_from_dict
from trt_eagle3.engine.bundle.read import read_bundle
from trt_eagle3.engine.onnxruntime.backend import OnnxRuntimeBackend
from trt_eagle3.engine.runtime.backend import BACKENDS, Library, all_backends, backend_named
from trt_eagle3.engine.runtime.requirement import Requirement
from trt_eagle3.engine.runtime.session import open_session
from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.triton.repository import deploy

PACKAGE = Path(trt_eagle3.__file__).parent
OWN = (
    "backend_support.py",
    "tensorrt_config.py",  # its runtime ``tensorrt`` is called as a backend
    "engine/runtime/backend.py",
    "engine/onnxruntime/",
    "engine/torch/",
    "engine/trt/",
)


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
    assert {f: names for f, names in found.items() if names} == {}


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
    assert set(SUPPORT) == set(BACKENDS)
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


class Mirror(OnnxRuntimeBackend):
    """Another backend, in one class: ONNX Runtime, which needs something that nobody has."""

    name = "mirror"
    exact_packages: Mapping[str, str] = {"onnxruntime": "Mirror's runtime"}

    def requirements(self) -> Mapping[str, tuple[Requirement, ...]]:
        return {"mirror": (Requirement("silver", lambda _: None, "polish it"),)}

    def libraries(self, config: EngineConfig) -> tuple[Library, ...]:
        del config
        return (Library("TRT_EAGLE3_MIRROR", None, "make mirror"),)


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(BACKENDS, dict)
    assert isinstance(SUPPORT, dict)
    monkeypatch.setitem(BACKENDS, "mirror", f"{__name__}:Mirror")
    support = replace(SUPPORT["onnxruntime"], defaults={"prefill_chunk": 64})
    monkeypatch.setitem(SUPPORT, "mirror", support)


@pytest.mark.usefixtures("mirror")
def test_another_backend_is_one_class_and_two_entries(tmp_path: Path) -> None:
    bundle = build_tiny(tmp_path, engine={"backend": "mirror"})
    record = read_bundle(bundle)
    assert record.engine.backend == "mirror"
    assert EngineConfig.model_validate({"backend": "mirror"}).prefill_chunk == 64
    session = open_session("mirror", bundle / "fuse" / "model.onnx", bundle)
    assert session.run({"aux_hidden_states": torch.zeros(2, 768)})["features"].shape == (2, 256)
    with pytest.raises(EnvironmentMissingError, match="mirror: missing: silver: polish it"):
        check_bundle(bundle, record, diagnose(record.config.engine))
    assert any("make mirror" in note for note in deploy(bundle, tmp_path / "r").notes)
    other = tmp_path / "other" / "bundle.json"
    shutil.copytree(bundle, other.parent)
    other.write_text(other.read_text().replace(version("onnxruntime"), "0.1"))
    with pytest.raises(UserError, match=r"built for Mirror's runtime 0\.1, but tiny for "):
        deploy(other.parent, tmp_path / "r", name="second")
    with pytest.raises(UserError, match="expected one of mirror, onnxruntime, tensorrt, torch"):
        config_from_dict(
            {"name": "a", "target": {"checkpoint": "x"}, "engine": {"backend": "m"}}, "x"
        )
