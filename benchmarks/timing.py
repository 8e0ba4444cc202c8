"""Device timing: medians of CUDA events, and the rates from which floors are computed."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from rich.table import Table

from trt_eagle3.errors import EnvironmentMissingError

__all__ = ["copy_bandwidth", "kernel_table", "matmul_rate", "median_ms"]

_REPEATS = 30
_PROFILED, _KERNELS = 10, 12  # runs of a profile, and kernels that it names
_BURST = 8  # runs between two events: the host is ahead of the device, as in the decode loop
_LONG_SECONDS = 0.05  # longer runs are measured one by one, and less often
_MATRIX = 8192  # rows and columns of the products that the rate is measured with


def copy_bandwidth() -> float:
    """Return bytes per second of a large device copy, read and written.

    Raises:
        EnvironmentMissingError: torch sees no GPU.
    """
    _check_gpu()
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / (1e-3 * median_ms(lambda: target.copy_(source)))


def matmul_rate(dtype: torch.dtype = torch.float16) -> float:
    """Return floating-point operations per second of a large product of random matrices.

    Raises:
        EnvironmentMissingError: torch sees no GPU.
    """
    _check_gpu()
    left, right = torch.randn(2, _MATRIX, _MATRIX, dtype=dtype, device="cuda")
    return 2 * _MATRIX**3 / (1e-3 * median_ms(lambda: left @ right))


def _check_gpu() -> None:
    if not torch.cuda.is_available():
        raise EnvironmentMissingError(
            "this benchmark measures a CUDA GPU, and torch sees none. Run it on a machine with one."
        )


def kernel_table(run: Callable[[], object], title: str) -> Table:
    """Return the device time of the longest kernels of a warm ``run``, in microseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(_PROFILED):
            run()
        torch.cuda.synchronize()
    table = Table(title, "us a run", "launches")
    for event in sorted(profiler.key_averages(), key=lambda e: -e.device_time_total)[:_KERNELS]:
        us, count = event.device_time_total / _PROFILED, event.count / _PROFILED
        table.add_row(event.key[:70], f"{us:.0f}", f"{count:.0f}")
    return table


def median_ms(run: Callable[[], object]) -> float:
    """Return the median device time of ``run`` in milliseconds, warm."""
    for _ in range(3):
        run()
    is_long = _burst_ms(run, 1) > 1e3 * _LONG_SECONDS
    burst, repeats = (1, 5) if is_long else (_BURST, _REPEATS)
    return median(_burst_ms(run, burst) for _ in range(repeats))


def _burst_ms(run: Callable[[], object], burst: int) -> float:
    """Return the device time of one of ``burst`` runs, in milliseconds."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(burst):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / burst
