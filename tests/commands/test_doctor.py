"""doctor: it never fails for what is missing, and a bundle that cannot run here gives exit 3."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from tests.tiny import build_tiny
from trt_eagle3.cli import cli
from trt_eagle3.commands.doctor import Ability, Diagnosis, Finding, diagnose
from trt_eagle3.config import EngineConfig
from trt_eagle3.engine.trt import plugins as tensorrt_plugins
from trt_eagle3.engine.trt.dialects import registry
from trt_eagle3.engine.trt.plugins import PLUGINS_VARIABLE
from trt_eagle3.errors import EnvironmentMissingError, UserError


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where every look fails, each in its own way."""

    def fail(error: Exception) -> Callable[..., None]:
        def look(*_: object, **__: object) -> None:
            raise error

        return look

    for module, name, error in (
        (torch.cuda, "is_available", RuntimeError("no driver")),
        (registry, "load_dialect", EnvironmentMissingError("no TensorRT")),
        (tensorrt_plugins, "plugin_library_path", OSError("no library")),
        (subprocess, "run", FileNotFoundError("nvidia-smi")),
        (shutil, "which", ImportError("nvcc")),
    ):
        monkeypatch.setattr(module, name, fail(error))


@pytest.mark.usefixtures("bare")
def test_missing_things_are_named_with_what_they_are_needed_for() -> None:
    found = diagnose()
    missing = {finding.name for finding in found.findings if finding.value is None}
    assert {"GPU", "TensorRT", "plugin library", "driver", "nvcc"} <= missing
    lacks = {ability.name: ability.lacks for ability in found.abilities}
    assert lacks["onnxruntime"] == ()
    assert lacks["tensorrt"] == ("GPU", "TensorRT", "plugin library")
    assert all(finding.fix for finding in found.findings if finding.value is None)


@pytest.mark.usefixtures("bare")
def test_json_is_one_object_and_exit_0_where_onnxruntime_works() -> None:
    done = CliRunner().invoke(cli, ["doctor", "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert {"installed", "abilities"} == found.keys()
    works = {ability["name"]: ability["works"] for ability in found["abilities"]}
    assert works["onnxruntime"]
    assert not works["tensorrt"]


@pytest.mark.usefixtures("bare")
@pytest.mark.usefixtures("wide_console")
def test_bundle_that_needs_what_is_missing_gives_exit_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bundle = build_tiny(
        tmp_path, engine={"backend": "tensorrt", "device": "cuda", "dtype": "float16"}
    )
    runner = CliRunner()
    with pytest.raises(
        EnvironmentMissingError, match=r"tensorrt: missing: GPU: a CUDA GPU.*TensorRT: pip install"
    ):
        runner.invoke(cli, ["doctor", str(bundle)], catch_exceptions=False)
    assert EnvironmentMissingError.exit_code == 3
    done = runner.invoke(cli, ["doctor", str(build_tiny(tmp_path / "cpu"))], catch_exceptions=False)
    assert done.exit_code == 0
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"{tmp_path / 'cpu/tiny'}: runs here: 8 sequences at once, KV cache of")
    done = runner.invoke(cli, ["doctor", str(bundle), "--json"])
    found = json.loads(done.stdout)["bundle"]
    assert (found["runs"], found["why_not"]) == (False, str(done.exception))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("vision/model.onnx", None, "vision/model.onnx: not readable: "),
        ("draft/model.onnx", b"\xff", "draft/model.onnx: not readable: "),
        ("target/model.onnx", b"", "target/model.onnx: holds no graph"),
        ("processor/tokenizer.json", b"{", "broken tokenizer"),
        ("tuning.json", b"{", "tuning.json: a damaged table"),
    ],
)
@pytest.mark.usefixtures("bare")
def test_damaged_bundle_is_refused(
    tmp_path: Path, file: str, content: bytes | None, message: str
) -> None:
    bundle = build_tiny(tmp_path)
    (bundle / file).unlink(missing_ok=True)
    if content is not None:
        (bundle / file).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        CliRunner().invoke(cli, ["doctor", str(bundle)], catch_exceptions=False)
    assert "\n" not in str(caught.value)


def test_plugin_library_that_the_bundle_names_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    registry.load_dialect.cache_clear()
    monkeypatch.delenv(PLUGINS_VARIABLE, raising=False)
    (tmp_path / "plugins.so").touch()
    library = {"plugin_library": str(tmp_path / "plugins.so")}
    engine = EngineConfig.model_validate({"backend": "tensorrt", "tensorrt": library})
    found = {finding.name: finding.value for finding in diagnose(engine).findings}
    assert found["plugin library"] == f"{tmp_path / 'plugins.so'} (not loaded: no TensorRT)"


def test_tables_keep_square_brackets() -> None:
    found = Diagnosis(
        (Finding("TensorRT", None, "pip install 'trt-eagle3[tensorrt]'"),),
        (Ability("x", ("TensorRT",)),),
    )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(*found.tables())
    assert "pip install 'trt-eagle3[tensorrt]'" in console.export_text()
