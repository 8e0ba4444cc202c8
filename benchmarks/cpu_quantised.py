"""Decoding with quantised weights on the CPU: ``python -m benchmarks.cpu_quantised``.

A small text geometry with random weights, batch 1, without speculation: float32 against
``engine.weights`` with ``engine.activations``, in one process, all alternating, best of the rounds.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cpu import (
    CpuEngine,
    best_ms,
    cpu_engine,
    decoded,
    small_model,
    small_size,
)
from trt_eagle3.config import EngineConfig
from trt_eagle3.engine.weight_quantiser import quantise_target
from trt_eagle3.families.registry import read_target
from trt_eagle3.io.run_command import run_command

__all__ = ["main"]

_ROWS = (1, 6, 16)
_CONFIGS = {
    "float32": EngineConfig(),
    "int8, activations int8": EngineConfig(weights="int8", activations="int8"),
    "int4, activations int8": EngineConfig(weights="int4", activations="int8"),
    "int4, and the head": EngineConfig(weights="int4", activations="int8", quantise_head=True),
}


@click.command()
@small_size
@click.option("--context", default=256, show_default=True, help="Prompt tokens.")
@click.option("--tokens", default=24, show_default=True, help="Tokens decoded per round.")
@click.option("--rounds", default=3, show_default=True, help="The best of so many rounds counts.")
def main(size: str, context: int, tokens: int, rounds: int) -> None:
    """Print tokens per second and step times of each."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        root = Path(folder)
        small_model(size).bfloat16().save_pretrained(root)
        spec = read_target(root)
        engines: dict[str, CpuEngine] = {}
        for name, config in _CONFIGS.items():
            target, weights = spec, config.weights
            if weights is not None:
                file, head = root / f"{len(engines)}.safetensors", config.quantise_head
                target = quantise_target(spec, weights, file, head=head)
            engines[name] = cpu_engine(root, target, config)
        ids = torch.randint(1000, spec.vocab_size // 2, (context,))
        speed = dict.fromkeys(engines, 0.0)
        steps = {name: [float("inf")] * len(_ROWS) for name in engines}
        for _ in range(rounds):
            for name, (decode, step) in engines.items():
                speed[name] = max(speed[name], decoded(decode, ids, tokens)[0])
                run = partial(step, context)
                found = [best_ms(run, n, rounds) for n in _ROWS]
                steps[name] = list(map(min, steps[name], found))
    _print(size, speed, steps)


def _print(size: str, speed: dict[str, float], steps: dict[str, list[float]]) -> None:
    table = Table(size, "tok/s", "ratio", *(f"{n} rows, ms" for n in _ROWS))
    first = next(iter(speed.values()))
    for name, tokens in speed.items():
        times = [f"{ms:.1f}" for ms in steps[name]]
        table.add_row(name, f"{tokens:.2f}", f"{tokens / first:.2f}", *times)
    Console().print(table)


if __name__ == "__main__":
    run_command(main)
