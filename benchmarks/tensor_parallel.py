"""Several GPUs of one machine: ``python -m benchmarks.tensor_parallel``.

Measures steps and cycles of big pairs with random weights on 1 and more GPUs, through the real
ranks (``decode/parallel``), and the sums between the GPUs alone, inside a captured graph. Each
measurement runs in a process of its own with a time limit, so one that hangs costs only its row.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.gpu import cycle_ms, target_ms
from benchmarks.random_pair import drawing_ranks, random_pair
from benchmarks.timing import median_ms
from trt_eagle3.config import BuildConfig, load_config
from trt_eagle3.decode.llm import LLM
from trt_eagle3.engine.runtime.collectives import PeerMemory, check_devices, open_collectives
from trt_eagle3.io.run_command import run_command
from trt_eagle3.pipeline import build
from trt_eagle3.sharding import Shard

__all__ = ["main"]

_CONTEXT = 1024
_PROMPT = 8192
_CHUNK = 4096
_ROWS = (1, 4, 32, 64)
_SUMS = (16 << 10, 256 << 10, 2 << 20, 40 << 20)  # bytes
_LAUNCHES = 40  # sums in a captured graph
_LIMIT_S = 75.0
_TINY = Path(__file__).parent.parent / "build_configs/tiny.yaml"


@click.command()
@click.option("--sizes", default="32b,8b,30b-a3b", show_default=True)
@click.option("--ranks", "counts", default="1,2", show_default=True, help="Numbers of GPUs.")
@click.option("--limit", default=_LIMIT_S, show_default=True, help="Seconds of a measurement.")
@click.option("--one", hidden=True, help="Measure this pair on --ranks GPUs in this process.")
@click.option("--sums", is_flag=True, hidden=True, help="Measure sums alone in this process.")
@click.option("--tokens", is_flag=True, hidden=True, help="Compare tokens in this process.")
def main(sizes: str, counts: str, limit: float, one: str | None, sums: bool, tokens: bool) -> None:
    """Print the milliseconds of steps by number of GPUs, and the microseconds of sums."""
    numbers = [int(word) for word in counts.split(",")]
    if one is not None:
        print(json.dumps(_measure(one, numbers[0])), flush=True)
        os._exit(0)  # the ranks end with the connection
    if sums:
        print(json.dumps(_sums(numbers[0])), flush=True)
        os._exit(0)
    if tokens:
        print(json.dumps(_tokens(numbers[0])), flush=True)
        os._exit(0)
    console = Console(width=110)
    most = max(numbers)
    check_devices(most, "cuda")
    if most > 1:
        compared = _child(["--tokens", "--ranks", str(most)], limit)
        console.print(f"tiny pair in float32, answers equal on 1 and {most} GPUs: {compared}")
        console.print(_sums_table(_child(["--sums", "--ranks", str(most)], limit), most))
    for size in sizes.split(","):
        rows = {n: _child(["--one", size, "--ranks", str(n)], limit) for n in numbers}
        console.print(_steps_table(size, rows))
    console.print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}")


def _child(options: list[str], limit: float) -> Mapping[str, float]:
    """Run this program with ``options``; returns its numbers, none if it failed."""
    words = [sys.executable, "-m", "benchmarks.tensor_parallel", *options]
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=limit, check=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        print(f"{' '.join(options)}: {error}", file=sys.stderr, flush=True)
        return {}
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _steps_table(size: str, rows: Mapping[int, Mapping[str, float]]) -> Table:
    table = Table(f"{size}, bfloat16, ms", *(f"{n} GPUs" for n in rows), "speed, last to first")
    first, *_, last = [*rows.values()] * 2
    for name in dict.fromkeys(name for row in rows.values() for name in row):
        ratio = first[name] / last[name] if name in first and name in last else 0.0
        cells = [f"{row[name]:.2f}" if name in row else "-" for row in rows.values()]
        table.add_row(name, *cells, f"{ratio:.2f}" if ratio else "-")
    return table


def _sums_table(found: Mapping[str, float], size: int) -> Table:
    ways = ("one-shot", "two-shot", "NCCL")
    table = Table(f"sum over {size} GPUs, us", *ways)
    for num_bytes in _SUMS:
        cells = [found.get(f"{way} {num_bytes}") for way in ways]
        label = f"{num_bytes >> 10} KB" if num_bytes < 1 << 20 else f"{num_bytes >> 20} MB"
        table.add_row(label, *("-" if us is None else f"{us:.1f}" for us in cells))
    return table


def _measure(size: str, count: int) -> dict[str, float]:
    """Return milliseconds by name."""
    ranks = drawing_ranks(count) if count > 1 else None
    found = {}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        pair = random_pair(Path(folder), size, 16, max_seq_len=_PROMPT + 1024, ranks=ranks)
        for rows in _ROWS:
            found[f"target, {rows} rows"] = target_ms(pair, _CONTEXT, rows)
        found["cycle, no draft"] = cycle_ms(pair, _CONTEXT, None)
        found["cycle, chain of 3"] = cycle_ms(pair, _CONTEXT, 3)
        decoder = pair.decoder(prefill_chunk=_CHUNK, drafting=False)
        times = []
        for _ in range(3):
            sequence, start = pair.sequence(_PROMPT), time.perf_counter()
            answer = decoder.run(sequence, None)
            next(answer)
            answer.close()
            times.append(1e3 * (time.perf_counter() - start))
        found[f"prompt of {_PROMPT}"] = min(times)
    return found


def _tokens(size: int) -> dict[str, float]:
    """Return how many answers of the trained tiny pair are equal on 1 and on ``size`` GPUs."""
    raw = load_config(_TINY).model_dump()
    raw["engine"] |= {"backend": "torch", "device": "cuda", "dtype": "float32"}
    asked = [f"What is {a} plus {b}?" for a in (2, 5) for b in (3, 9)]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        bundle = build(BuildConfig.model_validate(raw), output=Path(folder)).path
        for count in (1, size):
            with LLM(bundle, tensor_parallel=count) as llm:
                greedy = llm.generate(asked, max_tokens=64, ignore_eos=True)
                sampled = llm.generate(asked, max_tokens=64, temperature=1.0, seed=1)
                found.append([answer.token_ids for answer in greedy + sampled])
    equal = sum(one == other for one, other in zip(*found, strict=True))
    return {"answers": len(found[0]), "equal": equal}


def _sums(size: int) -> dict[str, float]:
    """Return microseconds by way and bytes, as rank 0 sees them."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        others = [
            context.Process(target=_sum_rank, args=(rank, size, folder, results), daemon=True)
            for rank in range(size)
        ]
        for process in others:
            process.start()
        found: dict[str, float] = results.get()
        for process in others:
            process.kill()
    return found


def _sum_rank(rank: int, size: int, folder: str, results: multiprocessing.SimpleQueue) -> None:  # type: ignore[type-arg]
    import torch.distributed as dist

    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(rank)
    with torch.inference_mode():
        ours = open_collectives(Shard(rank, size), Path(folder), "cuda")
        assert isinstance(ours, PeerMemory)
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            "one-shot": ours.one_shot,
            "two-shot": ours.two_shot,
        }
        found = {}
        for num_bytes in _SUMS:
            parts = [_drawn(other, num_bytes) for other in range(size)]
            own, expected = parts[rank], torch.stack([p.float() for p in parts]).sum(0)
            for name, way in ways.items():
                if name == "one-shot" and num_bytes > 4 << 20:
                    continue
                error = (way(own).float() - expected).abs().max().item()
                assert error < 0.1, f"{name} of {num_bytes} bytes: wrong by {error}"
                found[f"{name} {num_bytes}"] = _captured_us(partial(way, own))
        with suppress(RuntimeError):  # not every machine has it
            nccl = dist.new_group(backend="nccl")
            for num_bytes in _SUMS:
                copy = _drawn(rank, num_bytes)
                dist.all_reduce(copy, group=nccl)  # its first call may not be captured
                work = partial(dist.all_reduce, copy, group=nccl)
                found[f"NCCL {num_bytes}"] = _captured_us(work)
    if rank == 0:
        results.put(found)
    time.sleep(60)  # until rank 0's parent ends this process


def _drawn(rank: int, num_bytes: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(rank)
    rows = max(1, num_bytes >> 14)
    return torch.randn(
        rows, num_bytes // 2 // rows, dtype=torch.bfloat16, device="cuda", generator=generator
    )


def _captured_us(work: Callable[[], object]) -> float:
    """Return the microseconds of ``work`` in a graph that repeats it."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_LAUNCHES):
            work()
    return 1e3 * median([median_ms(graph.replay)]) / _LAUNCHES


if __name__ == "__main__":
    run_command(main)
