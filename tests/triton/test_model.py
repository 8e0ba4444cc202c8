"""What the model says of itself, without a server: those that ask for it are newer than the one of
these tests.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trt_eagle3.decode.metrics import stall_of
from trt_eagle3.serving import ServingConfig

IMPORTING = ("trt_eagle3.triton.model", "trt_eagle3.triton.response_stream")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """One whose engine says what it is told to."""
    utils = ModuleType("triton_python_backend_utils")
    monkeypatch.setattr(utils, "TRITONSERVER_RESPONSE_COMPLETE_FINAL", 1, raising=False)
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    for name in IMPORTING:
        assert name not in sys.modules, "it would be another server's"
    yield importlib.import_module(IMPORTING[0]).TritonPythonModel()
    for name in IMPORTING:
        del sys.modules[name]


def engine(step_seconds: float, *, ready: bool = True) -> SimpleNamespace:
    return SimpleNamespace(ready=ready, stall=lambda limit: stall_of(step_seconds, 0.0, limit))


@pytest.mark.parametrize(
    ("step_seconds", "limit", "ready"),
    [(0.0, 120.0, True), (120.0, 120.0, True), (121.0, 120.0, False), (121.0, None, True)],
)
def test_model_is_ready_while_its_engine_finishes_steps(
    model: Any, step_seconds: float, limit: float | None, ready: bool
) -> None:
    model._serving = ServingConfig(max_step_s=limit)
    model._engine = engine(step_seconds)
    assert model.is_ready() is ready


def test_model_whose_engine_has_stopped_is_not_ready(model: Any) -> None:
    model._serving = ServingConfig()
    model._engine = engine(0.0, ready=False)
    assert model.is_ready() is False
