"""Each kind of change that a test could leave behind is seen."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.global_state import global_state

SIGHUP = signal.getsignal(signal.SIGHUP)
LOGGER = logging.getLogger("trt_eagle3.serving")
CHANGES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "logger trt_eagle3.serving": (
        lambda: LOGGER.addFilter(bool),
        lambda: LOGGER.removeFilter(bool),
    ),
    "handler of SIGHUP": (
        lambda: signal.signal(signal.SIGHUP, lambda *_: None),
        lambda: signal.signal(signal.SIGHUP, SIGHUP),
    ),
    "torch.get_default_dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "environment's TRT_EAGLE3_TESTED": (
        lambda: os.environ.update(TRT_EAGLE3_TESTED="no"),
        lambda: None,
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_that_is_left_behind_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRT_EAGLE3_TESTED", "yes")
    change, undo = CHANGES[name]
    before = global_state()
    change()
    after = global_state()
    undo()
    assert [name for name in before if after.get(name) != before[name]] == [name]


def test_change_of_folder_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = global_state()
    monkeypatch.chdir(tmp_path)
    assert global_state()["working directory"] != before["working directory"]
