"""Device time, as far as it can be told without a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trt_eagle3.bench.timing import copy_bandwidth, matmul_rate
from trt_eagle3.errors import EnvironmentMissingError


@pytest.mark.parametrize("measure", [copy_bandwidth, matmul_rate])
def test_benchmark_of_a_gpu_says_that_there_is_none(
    measure: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentMissingError, match="measures a CUDA GPU"):
        measure()
