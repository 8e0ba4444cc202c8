"""Times a layer's dense products in one launch on this machine's GPU beside the single kernels.

    python plugins/bench/dense_layer.py

Every figure is the median over replays of one CUDA graph that holds several layers of the 8B
geometry, each with its own weights, without attention. The floor is the weights' bytes over the
copy bandwidth of this run. Parts: the same launch, with next to no bytes in the other weights.
`fixed` has next to none at all: what launches, barriers and rows take.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.timing import copy_bandwidth, median_ms
from trt_eagle3.engine import capi
from trt_eagle3.engine.torch.packed import Fp8Weight, Int4Weight
from trt_eagle3.io.run_command import run_command

SIZES = (4096, 4096, 12288, 6144)  # A, H, I, N
PARTS = {
    "gate_up and down": (128, 4096, 12288, 16),
    "o and qkv": (4096, 4096, 128, 6144),
    "fixed": (128, 4096, 128, 16),
}
LAYERS = 12
DEVICE = torch.device("cuda")
EPSILON = 1e-6
PER_CODE = {Int4Weight: 8, Fp8Weight: 1}  # columns of an element

Layer = tuple[Int4Weight, ...] | tuple[Fp8Weight, ...]
Run = Callable[[Layer, Tensor, Tensor], Tensor]
"""(weights, attention's output, stream) -> q, k and v."""


def draw(kind: str, sizes: tuple[int, ...]) -> Layer:
    """Weights of o, gate_up, down and qkv."""
    a, h, i, n = sizes
    shapes = ((h, a), (2 * i, h), (h, i), (n, h))
    if kind == "int4":
        return tuple(_int4(*shape) for shape in shapes)
    return tuple(_fp8(*shape) for shape in shapes)


def _int4(n: int, k: int) -> Int4Weight:
    words = torch.randint(-(2**31), 2**31, (n, k // 8), device=DEVICE).to(torch.int32)
    scale = (torch.rand(n, k // 128, device=DEVICE) * 0.3 * k**-0.5).to(torch.bfloat16)
    return Int4Weight(words, scale, None)


def _fp8(n: int, k: int) -> Fp8Weight:
    codes = torch.randint(0, 256, (n, k), device=DEVICE, dtype=torch.uint8) & 0xBF  # no NaN
    scale = torch.rand(n, 1, device=DEVICE) * 0.02 * k**-0.5
    return Fp8Weight(codes.view(torch.float8_e4m3fn), scale)


def num_bytes(layer: Layer) -> int:
    return sum(w.codes.nbytes + w.scale.nbytes for w in layer)


class Ways:
    """How a layer is computed."""

    def __init__(self) -> None:
        self._norm = torch.rand(SIZES[1], device=DEVICE).bfloat16()
        self._barrier = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def singles(self, layer: Layer, x: Tensor, stream: Tensor) -> Tensor:
        """By single kernels."""
        o, gate_up, down, qkv = layer
        norm = partial(capi.add_rms_norm, epsilon=EPSILON)
        y, middle = norm(o.linear(x), self._norm, stream)
        y, _ = norm(down.linear(capi.silu_mul(gate_up.linear(y))), self._norm, middle)
        return qkv.linear(y)

    def one(
        self, layer: Layer, x: Tensor, stream: Tensor, *, slots: int = 0, overlap: bool = True
    ) -> Tensor:
        """By one launch."""
        norms = (self._norm, self._norm)
        how = {"epsilon": EPSILON, "slots": slots, "prefetch_safe": overlap}
        if isinstance(layer[0], Int4Weight):
            int4 = [(w.codes, w.scale, w.zero_point) for w in layer if isinstance(w, Int4Weight)]
            rows = capi.dense_layer_int4(x, stream, norms, int4, self._barrier, **how)
        else:
            fp8 = [(w.codes, w.scale) for w in layer if isinstance(w, Fp8Weight)]
            rows = capi.dense_layer_fp8(x, stream, norms, fp8, self._barrier, **how)
        assert rows.y is not None
        return rows.y


def layer_us(run: Run, layers: list[Layer], rows: int) -> float | str:
    """Return the microseconds of a layer in a graph of all ``layers``, or why there are none."""
    x = torch.randn(rows, layers[0][0].codes.shape[1] * PER_CODE[type(layers[0][0])], device=DEVICE)
    stream = torch.randn(rows, SIZES[1], device=DEVICE).bfloat16()
    x = x.bfloat16()

    def all_layers() -> None:
        for layer in layers:
            run(layer, x, stream)

    try:
        all_layers()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_layers()
        return 1e3 * median_ms(graph.replay) / len(layers)
    except (NotImplementedError, RuntimeError) as error:
        return " ".join(str(error).split())[:60]


def row(name: str, times: list[float | str], floor: float) -> None:
    share = "{:.1f} ({:.0%})" if floor else "{:.1f}"
    cells = (t if isinstance(t, str) else share.format(t, floor / t) for t in times)
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


@click.command(help=__doc__)
@click.option("--kind", "kinds", multiple=True, default=("int4", "fp8"))
@click.option("--rows", "counts", multiple=True, type=int, default=(1, 8, 16))
@click.option("--slots", multiple=True, type=int, default=(2, 4, 6))
def main(kinds: tuple[str, ...], counts: tuple[int, ...], slots: tuple[int, ...]) -> None:
    bandwidth = copy_bandwidth()
    ways = Ways()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth * 1e-12:.2f} TB/s")
    print("us of a layer (share of the copy bandwidth)")
    for kind in kinds:
        layers = [draw(kind, SIZES) for _ in range(LAYERS)]
        floor = 1e6 * num_bytes(layers[0]) / bandwidth
        print(f"| {kind}, floor {floor:.1f} | {' | '.join(f'{n} rows' for n in counts)} |")
        forms: dict[str, Run] = {
            "single kernels": ways.singles,
            "one launch": ways.one,
            "one launch, no overlap with the launch before": partial(ways.one, overlap=False),
        }
        forms |= {f"one launch, {n} slots": partial(ways.one, slots=n) for n in slots}
        for name, run in forms.items():
            row(name, [layer_us(run, layers, n) for n in counts], floor)
        del layers
        for part, sizes in PARTS.items():
            layers = [draw(kind, sizes) for _ in range(LAYERS)]
            floor = 1e6 * num_bytes(layers[0]) / bandwidth
            for name in ("single kernels", "one launch"):
                times = [layer_us(forms[name], layers, n) for n in counts]
                row(f"{part}, {name}; floor {floor:.1f}", times, 0.0)


if __name__ == "__main__":
    run_command(main)
