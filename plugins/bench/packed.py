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
from typing import Any

import click
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.timing import copy_bandwidth
from trt_eagle3.engine import capi
from trt_eagle3.io.run_command import run_command

LAYERS = 36
SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]  # [N, K]
KINDS = ("fp8", "fp8 blocks", "int8", "int4 128", "int4 32 zeros", "nvfp4")
W8A8 = ("fp8 w8a8", "int8 w8a8")
STOCK = ("fp8 stock", "fp8 stock fast", "bfloat16 stock")
FEW, MANY = (1, 4, 8, 16, 32, 64, 128, 256), (512, 1024, 4096)
DEVICE = torch.device("cuda")

Product = Callable[[Any, Tensor], Tensor]


def draw(kind: str, n: int, k: int) -> tuple[Tensor, ...]:
    """Codes, scales, and zero points where the kind has them."""
    if kind.startswith("bfloat16"):
        return (torch.randn(n, k, device=DEVICE).bfloat16(),)
    if kind.startswith("int4") or kind == "nvfp4":
        words = torch.randint(-(2**31), 2**31, (n, k // 8), device=DEVICE).to(torch.int32)
        if kind == "nvfp4":
            scale = torch.rand(n, k // 16, device=DEVICE).to(torch.float8_e4m3fn)
            return words, scale, torch.rand(n, 1, device=DEVICE)
        group = int(kind.split()[1])
        scale = torch.rand(n, k // group, device=DEVICE).to(torch.bfloat16)
        zeros = torch.randint(0, 16, scale.shape, device=DEVICE, dtype=torch.uint8)
        return (words, scale, zeros) if "zeros" in kind else (words, scale)
    codes = torch.randint(0, 256, (n, k), device=DEVICE, dtype=torch.uint8)
    if kind.startswith("int8"):
        return codes, torch.rand(n, 1, device=DEVICE)
    codes &= 0xBF  # no NaN
    scale = torch.rand((n // 128, k // 128) if "blocks" in kind else (n, 1), device=DEVICE)
    return codes.view(torch.float8_e4m3fn), scale


def product(kind: str, weight: tuple[Tensor, ...]) -> Product:
    """(x, out) -> out; x is what ``rows_of`` makes."""
    if kind == "bfloat16 stock":
        return lambda x, out: torch.mm(x, weight[0].T, out=out)
    codes, scale = weight[:2]
    if kind.startswith("fp8 stock"):
        fast, by_row = kind.endswith("fast"), scale.T.contiguous()
        return lambda x, out: torch._scaled_mm(
            x.q, codes.T, x.scale.T, by_row, out_dtype=out.dtype, out=out, use_fast_accum=fast
        )
    if "w8a8" in kind:
        return lambda x, out: capi.linear_w8a8(
            x.q, x.scale, codes, scale, out.dtype, prefetch_safe=True, out=out
        )
    if kind == "nvfp4":
        return lambda x, out: capi.linear_nvfp4(x, *weight, prefetch_safe=True, out=out)
    if kind.startswith("int4"):
        zeros = weight[2] if len(weight) > 2 else None
        return lambda x, out: capi.linear_int4(x, codes, scale, zeros, prefetch_safe=True, out=out)
    call = capi.linear_int8 if kind == "int8" else capi.linear_fp8
    return lambda x, out: call(x, codes, scale, prefetch_safe=True, out=out)


def rows_of(kind: str, rows: int, k: int) -> Any:
    """What the products of the kind take."""
    x = torch.randn(rows, k, device=DEVICE).bfloat16()
    if kind.startswith("fp8 stock") or "w8a8" in kind:
        return capi.quantise_rows(x, integers=kind.startswith("int8"))
    return x


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


def run_all(products: list[Product], x: dict[int, Any], out: list[Tensor]) -> None:
    for i, multiply in enumerate(products):
        multiply(x[SHAPES[i % len(SHAPES)][1]], out[i % len(SHAPES)])


def chain(products: list[Product], x: Any, out: Tensor) -> None:
    for multiply in products:
        multiply(x, out)


def times(kind: str, products: list[Product], rows: int) -> str:
    """Milliseconds; "-" where no kernel takes so many rows."""
    x = {k: rows_of(kind, rows, k) for k in (4096, 12288)}
    out = [torch.empty(rows, n, device=DEVICE, dtype=torch.bfloat16) for n, _ in SHAPES]
    try:
        return f"{median_ms(partial(run_all, products, x, out)):.2f}"
    except NotImplementedError:
        return "-"


def each(products: list[Product], x: Any, out: Tensor) -> str:
    """Microseconds of a product; "-" where no kernel takes so many rows."""
    try:
        return f"{1e3 * median_ms(partial(chain, products, x, out)) / len(products):.1f}"
    except NotImplementedError:
        return "-"


def each_shape(kind: str, rows: tuple[int, ...]) -> None:
    """Microseconds of a product of each shape, in a chain of its like."""
    for n, k in SHAPES:
        weights = [draw(kind, n, k) for _ in range(-(-(2**28) // (n * k)))]
        products = [product(kind, weight) for weight in weights] * 4
        found = []
        for num_rows in rows:
            x, out = rows_of(kind, num_rows, k), torch.empty(num_rows, n, device=DEVICE).bfloat16()
            found.append(each(products, x, out))
        print(f"| {kind}, {n} x {k} | {' | '.join(found)} |")


@click.command(help=__doc__)
@click.option("--kind", "kinds", multiple=True, default=(*KINDS, *W8A8, *STOCK))
@click.option("--shapes", is_flag=True, help="Each shape by itself too, in us.")
def main(kinds: tuple[str, ...], shapes: bool) -> None:
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth * 1e-12:.2f} TB/s; ms")
    print(f"| weights | floor | {' | '.join(map(str, (*FEW, *MANY)))} |")
    for kind in kinds:
        weights = [draw(kind, *SHAPES[i % 4]) for i in range(4 * LAYERS)]
        products = [product(kind, weight) for weight in weights]
        floor = 1e3 * sum(t.nbytes for weight in weights for t in weight) / bandwidth
        rows = FEW if kind in KINDS else (*FEW, *MANY)
        row = " | ".join(times(kind, products, n) for n in rows)
        print(f"| {kind} | {floor:.2f} | {row} |", flush=True)
        del weights, products
        if shapes:
            each_shape(kind, rows)


if __name__ == "__main__":
    run_command(main)
