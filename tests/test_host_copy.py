"""Copies to the device: what arrives, and that the host does not wait for the device."""

from __future__ import annotations

import time

import pytest
import torch

from trt_eagle3.host_copy import to_device

CYCLES = 10**9  # of the device's clock: half a second and more


def test_to_device_on_the_cpu_is_the_tensor_itself() -> None:
    tensor = torch.arange(4)
    assert to_device(tensor, torch.device("cpu")) is tensor


@pytest.mark.gpu
def test_to_device_does_not_wait_for_what_the_device_has_to_do() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda")
    numbers = torch.arange(64 * 1024).expand(2, -1)
    to_device(numbers, device)  # the first page-locked memory takes longer
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    start = time.perf_counter()
    there = to_device(numbers, device)
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    assert time.perf_counter() - start > 0.3
    assert seconds < 0.1
    assert torch.equal(there.cpu(), numbers)
