"""What a serving process sets before it answers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from trt_eagle3.serving.warm_up import warm_up


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    yield
    torch.set_num_threads(threads)
    sys.setswitchinterval(interval)


@pytest.mark.parametrize(("device", "threads"), [("cuda", 1), ("cpu", 2)])
def test_torch_has_one_thread_where_the_gpu_computes(device: str, threads: int) -> None:
    torch.set_num_threads(2)
    engine: Any = MagicMock()
    engine.bundle.device, engine.bundle.spec.vision = device, None
    seen = []
    engine.submit.side_effect = lambda _: seen.append(torch.get_num_threads()) or []
    warm_up(engine)
    assert seen == [threads], "from the first request on"
    assert torch.get_num_threads() == threads
