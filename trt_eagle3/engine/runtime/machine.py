"""Name of this machine, architecture of its GPU, and timing of work on it."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

__all__ = ["gpu_arch", "machine_name", "seconds_of"]


def machine_name(device: str) -> str:
    """Return the GPU's name, or the processor's with the number of cores this process may use."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_processor()}, {cores} cores"


def gpu_arch() -> str | None:
    """Return the architecture of the current CUDA device (such as ``sm90``); None without one."""
    if not torch.cuda.is_available():
        return None
    return "sm{}{}".format(*torch.cuda.get_device_capability())


def seconds_of(work: Callable[[], object]) -> float:
    """Measure the wall time of ``work`` in seconds, including the GPU work that it launches."""
    _wait_for_gpu()
    start = time.perf_counter()
    work()
    _wait_for_gpu()
    return time.perf_counter() - start


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
