"""What a calibration will take of memory and time, reckoned before it begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from trt_eagle3.calibration.activations import MAX_SAMPLES
from trt_eagle3.calibration.prompts import CalibrationPrompts
from trt_eagle3.calibration.search import MAX_OUTPUTS, NUM_TRIALS
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.config import EngineConfig
from trt_eagle3.engine.machine import seconds_of
from trt_eagle3.engine.weight_quantiser import is_quantised_here
from trt_eagle3.engine.weight_schemes import INT4_RATIOS, int4_scales

__all__ = ["Reckoning", "calibration_device", "reckon"]

_PATCHES_AT_ONCE = 16384
_SAMPLE = 1024


@dataclass(frozen=True)
class Reckoning:
    """Bytes on the device at most, and seconds with the quantisation that follows."""

    num_bytes: int
    seconds: float

    def __str__(self) -> str:
        """For people."""
        minutes = max(1, round(self.seconds / 60))
        return f"about {self.num_bytes / 1e9:.1f} GB of memory and {minutes} min"


def calibration_device(engine: EngineConfig) -> str:
    """Where to calibrate: on the engine's device if it is here."""
    return "cuda" if engine.device == "cuda" and torch.cuda.is_available() else "cpu"


def reckon(
    spec: TargetCheckpoint, prompts: CalibrationPrompts, device: str, *, weights: bool = True
) -> Reckoning:
    """Of ``calibrate``, by how fast this machine multiplies and rounds; ``weights``: are made."""
    shapes = [
        (prod(ref.shape[:-1]), ref.shape[-1])
        for n, ref in spec.tensors.items()
        if is_quantised_here(n)
    ]
    values = sum(map(prod, shapes))
    if not weights:
        seconds = prompts.num_tokens * values * _warm_seconds(_multiply(device)) / _SAMPLE**3
        return Reckoning(_num_bytes(spec, prompts, values), seconds)
    tried = sum(min(rows, MAX_OUTPUTS) * columns for rows, columns in shapes)
    multiplied = prompts.num_tokens * (values + sum(_input_widths(spec, 2)))
    multiplied += NUM_TRIALS * 2 * MAX_SAMPLES * tried
    multiplied += sum(rows * columns**2 // 2 for rows, columns in shapes)
    multiplied += sum(_input_widths(spec, 3))
    rounded = NUM_TRIALS * tried + len(INT4_RATIOS) * values
    seconds = multiplied * _warm_seconds(_multiply(device)) / _SAMPLE**3
    seconds += rounded * _warm_seconds(_round(device)) / _SAMPLE**2
    return Reckoning(_num_bytes(spec, prompts, values), seconds)


def _num_bytes(spec: TargetCheckpoint, prompts: CalibrationPrompts, values: int) -> int:
    """float32: hidden states, visual levels, a layer's weights, samples of its inputs and what a
    trial makes of a weight; or what the tower makes of the patches that it sees at once.
    """
    hidden, inner = spec.hidden_size, max(x.mlp.row_width for x in spec.layers)
    kept = prompts.num_tokens * hidden
    kept += (1 + spec.num_visual_levels) * prompts.num_visual_tokens * hidden
    longest = max(len(inputs.token_ids) for inputs in prompts.inputs)
    layer = values // spec.num_layers + (2 * MAX_SAMPLES + 4 * MAX_OUTPUTS) * (hidden + inner)
    layer += longest * 6 * (hidden + inner) + 4 * inner**2 + 3 * hidden**2
    tower = 0
    if spec.vision and prompts.num_visual_tokens:
        patches = prompts.num_visual_tokens * spec.vision.spatial_merge_size**2
        width = 8 * spec.vision.hidden_size + 2 * spec.vision.intermediate_size
        tower = min(patches, _PATCHES_AT_ONCE) * width
    return 4 * (kept + max(layer, tower))


def _input_widths(spec: TargetCheckpoint, power: int) -> list[int]:
    """Widths of the inputs of all products, to a ``power``."""
    found = []
    for layer in spec.layers:
        found += [spec.hidden_size] * 2 + [layer.mixer.out_width, layer.mlp.row_width]
    return [width**power for width in found]


def _multiply(device: str) -> Callable[[], object]:
    a, b = torch.randn(2, _SAMPLE, _SAMPLE, device=device)
    return lambda: a @ b


def _round(device: str) -> Callable[[], object]:
    a = torch.randn(_SAMPLE, _SAMPLE, device=device)
    return lambda: int4_scales(a, 128, ratios=(1.0,))


def _warm_seconds(work: Callable[[], object]) -> float:
    """Of the second call."""
    work()
    return seconds_of(work)
