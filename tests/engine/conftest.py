"""A stand-in for TensorRT where there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fake_tensorrt import fake_tensorrt
from trt_eagle3.engine.trt import build as tensorrt_build
from trt_eagle3.engine.trt import bundle as tensorrt_bundle
from trt_eagle3.engine.trt import folder as tensorrt_folder
from trt_eagle3.engine.trt.dialects import dialect as tensorrt_dialect
from trt_eagle3.engine.trt.dialects import registry
from trt_eagle3.errors import EnvironmentMissingError

Install = Callable[..., Any]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a fake TensorRT of a version, an H200 and the plugin library in place."""

    def do(version: str, **behaviour: bool) -> Any:
        trt = fake_tensorrt(version, **behaviour)
        dialect = registry.dialect_of("tensorrt_rtx" if version[:2] == "1." else "tensorrt", trt)
        monkeypatch.setattr(registry, "load_dialect", lambda _: dialect)
        for module in (tensorrt_build, tensorrt_bundle):
            monkeypatch.setattr(module, "load_plugins", lambda _: Path("plugins.so"))
        for module in (tensorrt_dialect, tensorrt_folder):
            monkeypatch.setattr(module, "gpu_arch", lambda: "sm90")
        return trt

    return do


@pytest.fixture
def no_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise EnvironmentMissingError("TensorRT: not here.")

    monkeypatch.setattr(registry, "load_dialect", missing)
