"""What compute-sanitizer is to watch gets as far as the device: the library refuses none of it."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_size_t
from typing import Any

import pytest
import torch

from tests.plugins import sanitized
from trt_eagle3.engine.capi import launch
from trt_eagle3.engine.capi.structs import arguments_of
from trt_eagle3.graph.ops.kernel import KernelCall, Status


@pytest.fixture
def on_the_cpu(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that the library checks and nothing computes; tensors on the CPU."""

    def check(status: int) -> None:
        assert status in {Status.OK, Status.WRONG_DEVICE}, library.te3_last_error().decode()

    def checked(call: KernelCall[Any]) -> Any:
        args, name, workspace = arguments_of(call), f"te3_{call.kernel.name}", tuple[Any, ...]()
        if call.kernel.workspace:
            check(getattr(library, f"{name}_workspace")(byref(args), byref(c_size_t())))
            workspace = (None, 0)
        check(getattr(library, name)(byref(args), *workspace, None))
        return call.result

    monkeypatch.setattr(sanitized, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(launch, "launch", checked)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("group", sanitized.GROUPS)
def test_every_launch_is_one_that_the_library_takes(group: str) -> None:
    count = 0
    for name, run in sanitized.GROUPS[group]():
        try:
            run()
        except (AssertionError, ValueError) as error:
            raise AssertionError(name) from error
        count += 1
    assert count > 0
