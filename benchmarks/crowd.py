"""Cycle times of many sequences at once on one GPU: ``python -m benchmarks.crowd``.

A pair of a published geometry in bfloat16 with random weights, through the real scheduler and
sampler. Random drafts are hardly ever right, so a speculative cycle is a cost here, not a speed.
With ``--temperature`` all sequences sample. Prints medians of whole steps on the host's clock, the
host's time in each part of a step, kernel times by family, and the device's idle time.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.device_time import DeviceTime, device_time
from benchmarks.drawn_packed import kv_dtype_option, weights_option
from benchmarks.host_time import HostTime
from benchmarks.random_pair import RandomPair, random_pair
from benchmarks.synthetic import draft_option, size_option
from trt_eagle3.config import KVDtype, SpeculationConfig
from trt_eagle3.decode.policy.protocol import FixedPolicy
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.decode.schedule.scheduler import Scheduler
from trt_eagle3.decode.speculation.tree import AnyTree, static_tree
from trt_eagle3.io.run_command import run_command

__all__ = ["Crowd", "main"]

_ROOM = 256  # tokens after the context
_WARM = 8  # steps before the first measured one


@click.command()
@size_option
@click.option("--context", default=1024, show_default=True, help="Tokens of every prompt.")
@click.option(
    "--batch", "batches", multiple=True, type=int, default=(1, 8, 32, 64, 128), show_default=True
)
@click.option(
    "--steps",
    "depths",
    multiple=True,
    type=int,
    default=(0, 1, 2, 3),
    show_default=True,
    help="Draft steps of a chain; 0 is decoding without speculation.",
)
@click.option("--cycles", default=40, show_default=True, help="Steps per median.")
@click.option("--page-size", default=16, show_default=True)
@draft_option
@weights_option
@kv_dtype_option
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--top-k", default=20, show_default=True, help="For a temperature above 0.")
@click.option("--top-p", default=0.8, show_default=True, help="For a temperature above 0.")
@click.option("--kernels", is_flag=True, help="Also print the longest kernels of every case.")
def main(
    size: str,
    context: int,
    batches: tuple[int, ...],
    depths: tuple[int, ...],
    cycles: int,
    page_size: int,
    draft: str,
    weights: str,
    kv_dtype: KVDtype,
    temperature: float,
    top_k: int,
    top_p: float,
    kernels: bool,
) -> None:
    """Print the time of each part of a step, case by case, then cycle times by batch size."""
    sampling = SamplingParams()
    if temperature > 0.0:
        sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    times = Table(
        f"{size}, {draft}, {weights}, KV {kv_dtype}, context {context}, "
        f"temperature {temperature:g}",
        *(f"B {batch}" for batch in batches),
    )
    longest = Table("case", "kernel", "us a step", "launches")
    console = Console(width=200)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        pair = random_pair(
            Path(folder),
            size,
            page_size,
            max_seq_len=context + _ROOM,
            max_batch_size=max(batches),
            weights=weights,
            kv_dtype=kv_dtype,
            draft=draft,
        )
        for steps in depths:
            crowd = Crowd(pair, context, max(batches), steps, sampling)
            found: dict[int, float] = {}
            for batch in sorted(batches, reverse=True):
                crowd.shrink(batch)
                name = f"B {batch}, {_name(steps)}"
                found[batch] = crowd.median_ms(cycles)
                on_device = crowd.device_us(cycles)
                console.print(f"{name}: {found[batch]:.2f} ms")
                console.print(f"  host: {_parts(crowd.host_us(cycles))}")
                console.print(f"  device: {_parts(on_device.by_family)}")
                for kernel, us, launches in on_device.longest if kernels else ():
                    longest.add_row(name, kernel, f"{us:.0f}", f"{launches:.0f}")
            crowd.shrink(0)
            times.add_row(_name(steps), *(f"{found[batch]:.2f}" for batch in batches))
    console.print(*((longest,) if kernels else ()), times)
    console.print(f"ms a cycle; {torch.cuda.get_device_name()}")


def _name(steps: int) -> str:
    return f"chain of {steps}" if steps else "plain"


def _parts(us: dict[str, float]) -> str:
    """Format microseconds by part, the longest first."""
    ordered = sorted(us.items(), key=lambda part: -part[1])
    return ", ".join(f"{part} {taken:.0f}" for part, taken in ordered if taken >= 0.5)


class Crowd:
    """Sequences that decode in one batch, rewound before every measurement."""

    def __init__(
        self, pair: RandomPair, context: int, batch: int, steps: int, sampling: SamplingParams
    ) -> None:
        self._context = context
        self._tree: AnyTree | None = static_tree(SpeculationConfig(steps=steps)) if steps else None
        self._scheduler = Scheduler(
            pair.decoder(prefill_chunk=2048, drafting=steps > 0),
            max_batch_size=batch,
            policy=FixedPolicy(self._tree),
        )
        for _ in range(batch):
            self._scheduler.add(pair.sequence(context, sampling, drafting=steps > 0))
        while self._scheduler.waiting or any(not s.prefilled for s in self._scheduler.running):
            self._scheduler.step()

    def shrink(self, batch: int) -> None:
        """Release the sequences past the first ``batch``."""
        for sequence in self._scheduler.running[batch:]:
            self._scheduler.remove(sequence)

    def median_ms(self, cycles: int) -> float:
        """Return the median of steps, in milliseconds."""
        return 1e3 * median(self._seconds(cycles))

    def host_us(self, cycles: int) -> dict[str, float]:
        """Return microseconds of the host's time in a step, by part."""
        with HostTime() as host:
            steps = self._seconds(cycles)
        total = 1e6 * sum(steps) / len(steps)
        parts = {name: 1e6 * s / (cycles + _WARM) for name, s in host.seconds.items()}
        return {**parts, "rest": total - sum(parts.values()), "step": total}

    def device_us(self, cycles: int) -> DeviceTime:
        """Return microseconds of the device's time in a step, by family of kernels."""
        self._seconds(0)
        return device_time(self._scheduler.step, min(cycles, 10))

    def _seconds(self, cycles: int) -> Sequence[float]:
        self._rewind()
        for _ in range(_WARM):
            self._scheduler.step()
        found, last = [], time.perf_counter()
        for _ in range(cycles):
            self._scheduler.step()
            now = time.perf_counter()
            found.append(now - last)
            last = now
        return found

    def _rewind(self) -> None:
        """Rewind to the end of the prompt, so that contexts keep the given length."""
        for s in self._scheduler.running:
            assert s.prefilled
            del s.tokens[1:]
            s.pages.truncate(self._context)
            s.num_computed_tokens = self._context
            if s.draft is not None:
                s.num_draft_computed_tokens = self._context


if __name__ == "__main__":
    run_command(main)
