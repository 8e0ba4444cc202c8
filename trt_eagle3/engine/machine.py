"""What this machine is: its name in measurements, its GPU's architecture."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

__all__ = ["gpu_arch", "machine_name"]


def machine_name(device: str) -> str:
    """The GPU, or the processor and how many cores this process may use."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_processor()}, {cores} cores"


def gpu_arch() -> str | None:
    """``sm90`` and the like for the current CUDA device; None without one."""
    if not torch.cuda.is_available():
        return None
    return "sm{}{}".format(*torch.cuda.get_device_capability())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
