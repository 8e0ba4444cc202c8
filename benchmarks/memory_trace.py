"""Check that memory of this process and its GPU stays flat over a long run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch

__all__ = ["MemoryTrace"]

_MIB = 1 << 20
# Allowed difference between the least of the last two fifths and the most of the first two:
# allocators vary by some blocks. A steady leak of four times that over the run is detected: 16 KiB
# per request of two thousand.
_GROWTH_MIB = 8.0


class MemoryTrace:
    """Samples of a run, in MiB by kind of memory."""

    def __init__(self, device: str) -> None:
        """``device``: ``cpu`` or ``cuda``."""
        self._device = device
        self._samples: list[dict[str, float]] = []

    def sample(self) -> None:
        """Take a sample."""
        found = {"host": _anonymous_mib(), "python_blocks": sys.getallocatedblocks() / 1024}
        if self._device == "cuda":
            free, total = torch.cuda.mem_get_info()
            found["device"] = (total - free) / _MIB
            found["tensors"] = torch.cuda.memory_allocated() / _MIB
        self._samples.append(found)

    def faults(self) -> list[str]:
        """Return each kind of memory that grew."""
        grown = []
        for name in ("host", "device", "tensors"):
            values = [sample[name] for sample in self._samples if name in sample]
            if values and (change := _change(values)) > _GROWTH_MIB:
                grown.append(f"memory, {name}: grew by {change:.0f} MiB, {self._fifths(name)}")
        return grown

    def to_dict(self) -> dict[str, Any]:
        """Return MiB (of Python's blocks: thousands) in each fifth of the run."""
        return {name: self._fifths(name) for name in self._samples[0]}

    def _fifths(self, name: str) -> list[float]:
        return [round(v, 1) for v in _fifths([sample[name] for sample in self._samples])]


def _fifths(values: Sequence[float]) -> list[float]:
    edges = [round(len(values) * i / 5) for i in range(6)]
    return [mean(values[a:b]) for a, b in pairwise(edges) if b > a]


def _change(values: Sequence[float]) -> float:
    """Return the least of the last two fifths minus the most of the first two."""
    part = max(len(values) * 2 // 5, 1)
    return min(values[-part:]) - max(values[:part])


def _anonymous_mib() -> float:
    """Return resident memory that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(v.split()[1]) / 1024 for v in lines if v.startswith("RssAnon")), 0.0)
