"""A stand-in for TensorRT where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fake_tensorrt import fake_tensorrt
from trt_eagle3.engine.trt import build as tensorrt_build
from trt_eagle3.engine.trt import bundle as tensorrt_bundle
from trt_eagle3.engine.trt import folder as tensorrt_folder
from trt_eagle3.engine.trt import log as tensorrt_log
from trt_eagle3.engine.trt import plugins as tensorrt_plugins
from trt_eagle3.engine.trt import ports as tensorrt_ports
from trt_eagle3.engine.trt import versions as tensorrt_versions

Install = Callable[..., Any]
_WITH_TENSORRT = (
    tensorrt_versions,
    tensorrt_log,
    tensorrt_plugins,
    tensorrt_ports,
    tensorrt_build,
    tensorrt_bundle,
    tensorrt_folder,
)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a fake TensorRT of a version, an H200 and the plugin library in place."""

    def do(version: str, **behaviour: bool) -> Any:
        trt = fake_tensorrt(version, **behaviour)
        for module in _WITH_TENSORRT:
            monkeypatch.setattr(module, "tensorrt", lambda: trt)
        for module in (tensorrt_build, tensorrt_bundle):
            monkeypatch.setattr(module, "load_plugins", lambda _: Path("plugins.so"))
        for module in (tensorrt_bundle, tensorrt_folder):
            monkeypatch.setattr(module, "gpu_arch", lambda: "sm90")
        tensorrt_log.log.cache_clear()
        return trt

    yield do
    tensorrt_log.log.cache_clear()
