"""Times products with quantised weights on this machine's GPU beside their floor.

    python plugins/bench/packed.py

Every figure is the median over replays of one CUDA graph that holds the products of 36 layers of
the 8B geometry, each layer with its own weights: what they take in a decode step, without what
lies between. The floor is the weights'
bytes over the copy bandwidth of this run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from trt_eagle3.bench.timing import copy_bandwidth
from trt_eagle3.engine.torch import capi
from trt_eagle3.io.run_command import run_command

LAYERS = 36
SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]  # [N, K]
KINDS = ("fp8", "fp8 blocks", "int8", "int4 128", "int4 32 zeros")
ROWS = (1, 4, 8, 16, 32, 64)
DEVICE = torch.device("cuda")

Product = Callable[[Tensor, Tensor], Tensor]


def draw(kind: str, n: int, k: int) -> tuple[Tensor, ...]:
    """Codes, scales, and zero points where the kind has them."""
    if kind.startswith("int4"):
        group = int(kind.split()[1])
        words = torch.randint(-(2**31), 2**31, (n, k // 8), device=DEVICE).to(torch.int32)
        scale = torch.rand(n, k // group, device=DEVICE).to(torch.bfloat16)
        zeros = torch.randint(0, 16, scale.shape, device=DEVICE, dtype=torch.uint8)
        return (words, scale, zeros) if "zeros" in kind else (words, scale)
    codes = torch.randint(0, 256, (n, k), device=DEVICE, dtype=torch.uint8)
    if kind == "int8":
        return codes, torch.rand(n, 1, device=DEVICE)
    codes &= 0xBF  # no NaN
    scale = torch.rand((n // 128, k // 128) if "blocks" in kind else (n, 1), device=DEVICE)
    return codes.view(torch.float8_e4m3fn), scale


def product(kind: str, weight: tuple[Tensor, ...]) -> Product:
    codes, scale = weight[:2]
    if kind.startswith("int4"):
        zeros = weight[2] if len(weight) > 2 else None
        return lambda x, out: capi.linear_int4(x, codes, scale, zeros, prefetch_safe=True, out=out)
    call = capi.linear_int8 if kind == "int8" else capi.linear_fp8
    return lambda x, out: call(x, codes, scale, prefetch_safe=True, out=out)


def median_ms(run: Callable[[], object]) -> float:
    """Of replays of a graph of ``run``."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def run_all(products: list[Product], x: dict[int, Tensor], out: list[Tensor]) -> None:
    for i, multiply in enumerate(products):
        multiply(x[SHAPES[i % 4][1]], out[i % 4])


@click.command(help=__doc__)
def main() -> None:
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth * 1e-12:.2f} TB/s; ms")
    print(f"| weights | floor | {' | '.join(map(str, ROWS))} |")
    for kind in KINDS:
        weights = [draw(kind, *SHAPES[i % 4]) for i in range(4 * LAYERS)]
        products = [product(kind, weight) for weight in weights]
        floor = 1e3 * sum(t.nbytes for weight in weights for t in weight) / bandwidth
        times = []
        for rows in ROWS:
            x = {k: torch.randn(rows, k, device=DEVICE).bfloat16() for k in (4096, 12288)}
            out = [torch.empty(rows, n, device=DEVICE, dtype=torch.bfloat16) for n, _ in SHAPES]

            times.append(median_ms(partial(run_all, products, x, out)))
        print(f"| {kind} | {floor:.2f} | {' | '.join(f'{ms:.2f}' for ms in times)} |")
        del weights, products


if __name__ == "__main__":
    run_command(main)
