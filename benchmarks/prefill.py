"""Time to the first token of text prompts on one GPU: ``python -m benchmarks.prefill``.

A pair of a published geometry in bfloat16 with random weights, through the real scheduler, idle
before each prompt. Prints medians on the host's clock, from the prompt's arrival to its first
token. The floor is the operations of products and attention, at the rate of a large product of the
same run.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.device_time import device_time
from benchmarks.drawn_packed import weights_option
from benchmarks.random_pair import RandomPair, random_pair
from benchmarks.synthetic import size_option
from benchmarks.timing import matmul_rate
from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.policy.protocol import FixedPolicy
from trt_eagle3.decode.schedule.scheduler import Scheduler
from trt_eagle3.decode.speculation.tree import AnyTree, static_tree
from trt_eagle3.io.run_command import run_command
from trt_eagle3.spec import TargetSpec

__all__ = ["main", "prompt_operations"]

_ROOM = 64  # tokens after the longest prompt
_WARM = 2  # runs before the first measured one


@click.command()
@size_option
@click.option(
    "--context", "contexts", multiple=True, type=int, default=(1024, 8192, 32768), show_default=True
)
@click.option(
    "--chunk", "chunks", multiple=True, type=int, default=(4096,), show_default=True,
    help="engine.prefill_chunk.",
)  # fmt: skip
@click.option("--crowd", default=32, show_default=True, help="Concurrent prompts of 1024 tokens.")
@click.option("--runs", default=5, show_default=True, help="Runs per median.")
@click.option("--page-size", default=16, show_default=True)
@weights_option
@click.option("--profile", is_flag=True, help="Also print the device's time by kernel.")
def main(
    size: str,
    contexts: tuple[int, ...],
    chunks: tuple[int, ...],
    crowd: int,
    runs: int,
    page_size: int,
    weights: str,
    profile: bool,
) -> None:
    """Print the time to the first token of single prompts and of many at once."""
    rate = matmul_rate(torch.bfloat16)
    names = [*(str(n) for n in contexts), f"{crowd} x 1024", "and they continue"]
    loads = [*((1, n) for n in contexts), (crowd, 1024)]
    table = Table(f"{size}, {weights}, ms to the (last) first token", *names)
    families = Table("device, ms", "by family of kernels")
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        longest = max(*contexts, crowd * (1024 + _ROOM)) + _ROOM
        pair = random_pair(
            Path(folder),
            size,
            page_size,
            max_seq_len=longest,
            max_sequences=crowd,
            weights=weights,
        )
        floors = [1e3 * b * prompt_operations(pair.spec, n) / rate for b, n in loads]
        table.add_row("floor", *(f"{ms:.1f}" for ms in floors), "")
        for chunk in chunks:
            bench = _Bench(pair, chunk)
            found = [bench.median_ms(b, n, runs, stay=False) for b, n in loads]
            found.append(bench.median_ms(crowd, 1024, 3, stay=True))
            table.add_row(f"chunks of {chunk}", *(f"{ms:.1f}" for ms in found))
            for name, (b, n) in zip(names, loads, strict=False) if profile else ():
                families.add_row(f"{name}, chunks of {chunk}", bench.families(b, n))
    console = Console(width=180)
    console.print(*((families,) if profile else ()), table)
    console.print(f"products {rate / 1e12:.0f} TFLOP/s; {torch.cuda.get_device_name()}")


def prompt_operations(spec: TargetSpec, context: int) -> float:
    """Return additions and multiplications of the layers over a prompt of ``context`` tokens.

    They are products (of a mixture: of each row's experts), and attention over half of the square.
    """
    total = 0.0
    for layer in spec.layers:
        values = layer.mixer.num_values(spec.hidden_size)
        total += 2 * context * (values + 3 * layer.mlp.row_width * spec.hidden_size)
    for _, a in spec.attention_layers:
        total += 2 * context**2 * a.num_heads * a.head_dim
    return total


class _Bench:
    """Prompts through one scheduler."""

    def __init__(self, pair: RandomPair, chunk: int) -> None:
        self._pair = pair
        self._tree: AnyTree = static_tree(SpeculationConfig(steps=3))
        self._decoder = pair.decoder(prefill_chunk=chunk)

    def median_ms(self, batch: int, context: int, runs: int, *, stay: bool) -> float:
        """Measure from the arrival of ``batch`` prompts to the last one's first token.

        ``stay``: sequences continue to decode after their first token; else they end.
        """
        times = [1e3 * self._seconds(batch, context, stay=stay) for _ in range(_WARM + runs)]
        return median(times[_WARM:])

    def families(self, batch: int, context: int) -> str:
        """Return milliseconds of the device, by family of kernels."""
        found = device_time(lambda: self._seconds(batch, context, stay=False), 1)
        parts = sorted(found.by_family.items(), key=lambda part: -part[1])
        longest = ("", *(f"{us / 1e3:.2f} {n:.0f} {name}" for name, us, n in found.longest[:14]))
        named = "  ".join(f"{name} {us / 1e3:.2f}" for name, us in parts if us >= 5)
        return named + "\n".join(longest)

    def _seconds(self, batch: int, context: int, *, stay: bool) -> float:
        scheduler = Scheduler(self._decoder, max_batch_size=batch, policy=FixedPolicy(self._tree))
        for _ in range(batch):
            scheduler.add(self._pair.sequence(context))
        torch.cuda.synchronize()
        start, missing, first = time.perf_counter(), batch, 0.0
        while missing:
            for emission in scheduler.step():
                assert emission.error is None
                if emission.begins:
                    missing, first = missing - 1, time.perf_counter()
                    if not stay:
                        scheduler.remove(emission.sequence)
        for sequence in tuple(scheduler.running):
            scheduler.remove(sequence)
        torch.cuda.synchronize()
        return first - start


if __name__ == "__main__":
    run_command(main)
