"""Time and memory of calibration at a real size: ``python -m benchmarks.calibration``.

A few decoder layers of a published geometry with random weights, on prompts of random tokens.
Prints seconds per layer and the peak of device memory, beside the estimates made beforehand.
"""

from __future__ import annotations

import tempfile
import time
from itertools import pairwise
from pathlib import Path

import click
import torch

from benchmarks.drawn_weights import device_option, draw_weight
from benchmarks.synthetic import size_option, write_target
from trt_eagle3.calibration.prompts import MAX_TOKENS, CalibrationPrompts
from trt_eagle3.calibration.reckoning import reckon
from trt_eagle3.calibration.run import calibrate
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.families.registry import read_target
from trt_eagle3.io.run_command import run_command
from trt_eagle3.multimodal import ModelInputs

__all__ = ["main"]

_PROMPT = 512  # tokens
_LAYERS = 3  # as many as receive visual levels


@click.command()
@size_option
@click.option("--layers", default=_LAYERS, show_default=True)
@click.option("--tokens", default=MAX_TOKENS, show_default=True, help="Tokens of all prompts.")
@device_option
def main(size: str, layers: int, tokens: int, device: str) -> None:
    """Print the time and memory of calibrating a few layers."""
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        directory = Path(folder) / "target"
        write_target(directory, size, num_layers=layers)
        spec = read_target(directory)
        _draw(spec, device)
        prompts = _prompts(spec, tokens)
        expected = reckon(spec, prompts, device)
        steps: list[tuple[str, float]] = []
        calibrate(
            spec,
            prompts,
            device,
            Path(folder),
            lambda what: steps.append((str(what), time.perf_counter())),
        )
        steps.append(("end", time.perf_counter()))
    for (what, start), (_, end) in pairwise(steps):
        print(f"{what}: {end - start:.1f} s")
    total = steps[-1][1] - steps[0][1]
    peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else float("nan")
    print(
        f"{size}, {layers} layers, {tokens} tokens, {device}: {total:.1f} s (estimated "
        f"{expected.seconds:.1f}), peak {peak:.1f} GB (estimated {expected.num_bytes / 1e9:.1f})"
    )


def _draw(spec: TargetCheckpoint, device: str) -> None:
    """Write random numbers over the zeros of the layers and the token table."""
    for name, ref in spec.tensors.items():
        with ref.file.open("r+b") as stream:
            stream.seek(ref.offset)
            drawn = draw_weight(name, ref.shape, device).flatten()
            stream.write(drawn.view(torch.uint8).cpu().numpy().tobytes())


def _prompts(spec: TargetCheckpoint, tokens: int) -> CalibrationPrompts:
    """Make text prompts of random tokens."""
    drawn = torch.Generator().manual_seed(0)
    inputs = []
    for start in range(0, tokens, _PROMPT):
        count = min(_PROMPT, tokens - start)
        ids = torch.randint(0, spec.vocab_size, (count,), generator=drawn)
        positions = torch.arange(count, dtype=torch.int32).expand(3, -1).contiguous()
        none = torch.zeros(0, 3, dtype=torch.int64)
        visual = torch.zeros(count, dtype=torch.bool)
        inputs.append(ModelInputs(ids, positions, 0, (), none, visual))
    return CalibrationPrompts(inputs, len(inputs))


if __name__ == "__main__":
    run_command(main)
