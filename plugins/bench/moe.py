"""Times a mixture of experts on this machine's GPU beside its floor.

    python plugins/bench/moe.py

Every figure is the median over replays of one CUDA graph that holds the mixtures of some layers of
Qwen3-VL-30B-A3B's geometry, each layer with its own weights and routing, and with the rows that
the layer before it made: microseconds a layer. The floor of few rows is the weights' bytes of the
experts that any row goes through, over the copy bandwidth of this run; of many rows, that or the
products at the rate of a large matrix product, whichever is longer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.timing import copy_bandwidth, matmul_rate
from plugins.bench.packed import median_ms
from trt_eagle3.engine.torch.moe import DenseExperts, Experts, Fp8Experts, Int4Experts, fused_moe
from trt_eagle3.io.run_command import run_command

HIDDEN, WIDTH, EXPERTS, TOP_K = 2048, 768, 128, 8
LAYERS = 6
KINDS = ("bf16", "fp8", "fp8 blocks", "int4 128", "int4 32 zeros")
FEW = (1, 2, 4, 6, 8, 16, 32, 64)
MANY = (128, 512, 1024, 4096)
DEVICE = torch.device("cuda")

Layer = tuple[Experts, Experts, Tensor]
"""gate_up, down, and router logits of the most rows."""


def draw(kind: str, n: int, k: int) -> Experts:
    """Weights of all experts, [E, n, k]."""
    if kind == "bf16":
        weight = torch.empty(EXPERTS, n, k, device=DEVICE, dtype=torch.bfloat16)
        return DenseExperts(weight.normal_(std=k**-0.5))
    if kind.startswith("int4"):
        group = int(kind.split()[1])
        words = torch.randint(-(2**31), 2**31, (EXPERTS, n, k // 8), device=DEVICE)
        scale = torch.rand(EXPERTS, n, k // group, device=DEVICE) * (0.4 * k**-0.5)
        zeros = torch.randint(6, 11, scale.shape, device=DEVICE, dtype=torch.uint8)
        return Int4Experts(
            words.to(torch.int32), scale.to(torch.bfloat16), zeros if "zeros" in kind else None
        )
    codes = torch.empty(EXPERTS, n, k, device=DEVICE, dtype=torch.bfloat16).normal_(std=100)
    shape = (n // 128, k // 128) if "blocks" in kind else (n, 1)
    scale = torch.rand(EXPERTS, *shape, device=DEVICE) * (0.02 * k**-0.5)
    return Fp8Experts(codes.clamp_(-448, 448).to(torch.float8_e4m3fn), scale)


def weight_bytes(experts: Experts) -> int:
    """Of one expert."""
    tensors = (t for t in vars(experts).values() if isinstance(t, Tensor))
    return sum(t.nbytes for t in tensors) // EXPERTS


def touched(logits: Tensor) -> int:
    """Experts that any row goes through."""
    return int(logits.float().topk(TOP_K).indices.unique().numel())


def run_all(layers: Sequence[Layer], x: Tensor) -> Tensor:
    for gate_up, down, logits in layers:
        x = fused_moe(x, logits[: len(x)], gate_up, down, top_k=TOP_K, renormalise=1)
    return x


def layer_us(layers: Sequence[Layer], rows: int) -> float:
    x = torch.randn(rows, HIDDEN, device=DEVICE).bfloat16()
    return 1e3 * median_ms(partial(run_all, layers, x)) / len(layers)


def floor_us(layers: Sequence[Layer], rows: int, bandwidth: float, rate: float) -> float:
    gate_up, down, _ = layers[0]
    experts = sum(touched(logits[:rows]) for *_, logits in layers) / len(layers)
    read = experts * (weight_bytes(gate_up) + weight_bytes(down)) / bandwidth
    return 1e6 * max(read, 6 * rows * TOP_K * HIDDEN * WIDTH / rate)


@click.command(help=__doc__)
@click.option("--kinds", default=",".join(KINDS), show_default=True)
@click.option("--rows", default=",".join(map(str, (*FEW, *MANY))), show_default=True)
def main(kinds: str, rows: str) -> None:
    bandwidth, rate = copy_bandwidth(), matmul_rate(torch.bfloat16)
    sizes = [int(r) for r in rows.split(",")]
    print(
        f"{torch.cuda.get_device_name()}, copy {bandwidth * 1e-12:.2f} TB/s, bf16 products "
        f"{rate * 1e-12:.0f} TFLOP/s; microseconds a layer (of its floor)"
    )
    print(f"| experts | {' | '.join(map(str, sizes))} |")
    for kind in kinds.split(","):
        torch.manual_seed(0)
        layers: list[Layer] = []
        for _ in range(LAYERS):
            logits = torch.randn(max(sizes), EXPERTS, device=DEVICE).bfloat16()
            layers.append((draw(kind, 2 * WIDTH, HIDDEN), draw(kind, HIDDEN, WIDTH), logits))
        cells = []
        for size in sizes:
            us, floor = layer_us(layers, size), floor_us(layers, size, bandwidth, rate)
            cells.append(f"{us:.1f} ({us / floor:.2f})")
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)
        del layers


if __name__ == "__main__":
    run_command(main)
