"""Estimate the memory and time of a calibration before it begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from trt_eagle3.calibration.activations import MAX_SAMPLES
from trt_eagle3.calibration.footprint import Product, products_of_layer, reckon_bytes
from trt_eagle3.calibration.prompts import CalibrationPrompts
from trt_eagle3.calibration.search import MAX_OUTPUTS, NUM_TRIALS
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.engine.builder.weight_schemes import INT4_RATIOS, int4_scales
from trt_eagle3.engine.runtime.machine import seconds_of

__all__ = ["Reckoning", "calibration_device", "reckon"]

_SAMPLE = 1024


@dataclass(frozen=True)
class Reckoning:
    """Peak bytes on the device, and seconds including the quantisation afterwards."""

    num_bytes: int
    seconds: float

    def __str__(self) -> str:
        """Describe memory and time."""
        minutes = max(1, round(self.seconds / 60))
        return f"about {self.num_bytes / 1e9:.1f} GB of memory and {minutes} min"


def calibration_device(device: str) -> str:
    """Return ``device`` if this machine has it, else ``cpu``."""
    return "cuda" if device == "cuda" and torch.cuda.is_available() else "cpu"


def reckon(
    spec: TargetCheckpoint, prompts: CalibrationPrompts, device: str, *, weights: bool = True
) -> Reckoning:
    """Estimate ``calibrate`` by this machine's speed; ``weights``: whether they are quantised."""
    products = [p for i in range(spec.num_layers) for p in products_of_layer(spec, i)]
    multiplied = sum(prompts.num_tokens * p.share * _values(p) for p in products)
    rounded = 0
    if weights:
        multiplied += sum(_multiplied(p, prompts.num_tokens) for p in products)
        rounded = sum(NUM_TRIALS * _tried(p) + len(INT4_RATIOS) * _values(p) for p in products)
    seconds = multiplied * _warm_seconds(_multiply(device)) / _SAMPLE**3
    if rounded:
        seconds += rounded * _warm_seconds(_round(device)) / _SAMPLE**2
    num_bytes = reckon_bytes(spec, prompts, device, weights=weights)
    return Reckoning(num_bytes, seconds)


def _values(product: Product) -> int:
    return product.count * sum(product.outputs) * product.width


def _tried(product: Product) -> int:
    """Return how many numbers a trial of scales rounds."""
    return product.count * sum(min(n, MAX_OUTPUTS) for n in product.outputs) * product.width


def _multiplied(product: Product, num_tokens: int) -> float:
    """Return multiplications for input statistics, scale trials, compensation and the inverse."""
    rows, width = num_tokens * product.share, product.width
    found = product.count * (rows * width**2 + width**3)
    return found + NUM_TRIALS * 2 * MAX_SAMPLES * _tried(product) + _values(product) * width / 2


def _multiply(device: str) -> Callable[[], object]:
    a, b = torch.randn(2, _SAMPLE, _SAMPLE, device=device)
    return lambda: a @ b


def _round(device: str) -> Callable[[], object]:
    a = torch.randn(_SAMPLE, _SAMPLE, device=device)
    return lambda: int4_scales(a, 128, ratios=(1.0,))


def _warm_seconds(work: Callable[[], object]) -> float:
    """Return the seconds of the second call."""
    work()
    return seconds_of(work)
