"""Steps of the engines of this process that wait until they may go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from trt_eagle3.decode.schedule.scheduler import Scheduler

__all__ = ["held_steps"]


@contextmanager
def held_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No step comes back within the block."""
    may_go, step = threading.Event(), Scheduler.step

    def hang(scheduler: Scheduler) -> Any:
        assert may_go.wait(60)
        return step(scheduler)

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "step", hang)
        try:
            yield
        finally:
            may_go.set()
