"""The device's time in a step, by family of kernels, and its idle time."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["DeviceTime", "device_time", "family_of_kernel"]

_FAMILIES = {
    "attention": "(tree|prompt)_(attention|combine|write)",
    "products": r"linear|gemm|nvjet|cutlass|splitK|cublas",
    "norm, rope, silu": "rms_norm|rope|silu",
    "argmax, topk": "reduce_kernel|argmax|topk|sort|radix|gatherTopK|[Mm]ax",
    "kv move": "kv_move",
    "copies": "Mem(cpy|set)|[Cc]opy|CatArray",
}
_LONGEST = 12


@dataclass(frozen=True)
class DeviceTime:
    """Microseconds of a step.

    Attributes:
        by_family: of kernels; ``busy``: at least one kernel ran, ``idle``: none ran.
        longest: name, microseconds and launches of single kernels.
    """

    by_family: dict[str, float]
    longest: list[tuple[str, float, float]]


def family_of_kernel(name: str) -> str:
    """Return the family of the kernel ``name``."""
    return next((family for family, words in _FAMILIES.items() if re.search(words, name)), "other")


def device_time(step: Callable[[], object], count: int) -> DeviceTime:
    """Profile ``count`` steps; the profiler cuts the first and the last, which do not count."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type.name == "CUDA"]
    families = defaultdict[str, float](float)
    kernels = defaultdict[str, float](float)
    launches: Counter[str] = Counter()
    for event in events:
        taken = event.time_range.elapsed_us()
        families[family_of_kernel(event.name)] += taken / count
        kernels[event.name[:90]] += taken / count
        launches[event.name[:90]] += 1
    busy = _union([(e.time_range.start, e.time_range.end) for e in events])
    spans = [edge for e in events for edge in (e.time_range.start, e.time_range.end)]
    whole = max(spans, default=0.0) - min(spans, default=0.0)
    by_family = {**families, "busy": busy / count, "idle": (whole - busy) / count}
    most = sorted(kernels.items(), key=lambda kernel: -kernel[1])[:_LONGEST]
    longest = [(name, us, launches[name] / count) for name, us in most]
    return DeviceTime(by_family, longest)


def _union(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of ``spans``: launches overlap."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total
