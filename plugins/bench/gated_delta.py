"""Times GatedDelta and the commits of its states on this machine's GPU beside their floor.

    python plugins/bench/gated_delta.py

Every figure is the median over replays of one CUDA graph that holds the linear attention of some
layers of Qwen3.5-9B's or 27B's geometry, each layer with states of its own: microseconds a layer.
The floor is the bytes of the states, read and written once, and of the rows, over the copy
bandwidth of this run. ``copy``: a copy of as many bytes of states by a launch for each layer, which
is what such a launch can reach. Prompts have one sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.timing import copy_bandwidth
from plugins.bench.packed import median_ms
from trt_eagle3.engine import capi
from trt_eagle3.io.run_command import run_command

DEVICE = torch.device("cuda")
LAYERS, DIM, TAPS = 6, 128, 4
GEOMETRIES = {"9b": (16, 32), "27b": (16, 48)}  # Hk, Hv
BATCHES = (1, 4, 8, 32)
ROWS = (1, 2, 4, 6, 8, 16, 64)
PROMPTS = (128, 1024, 8192)


@dataclass(frozen=True)
class Layers:
    """Weights and states of ``LAYERS`` layers; B sequences of S rows."""

    heads: tuple[int, int]
    batch: int
    rows: int
    inputs: list[list[Tensor]]

    @classmethod
    def draw(cls, heads: tuple[int, int], batch: int, rows: int) -> Layers:
        return cls(heads, batch, rows, [_draw(heads, batch, rows) for _ in range(LAYERS)])

    def run(self, **settings: int) -> Tensor:
        """Each layer after the other."""
        for inputs in self.inputs:
            out = capi.gated_delta(
                *inputs,
                num_k_heads=self.heads[0],
                num_v_heads=self.heads[1],
                epsilon=1e-6,
                **settings,
            )[0]
        return out

    def num_bytes(self) -> int:
        """States read and written, and rows, of a layer."""
        hk, hv = self.heads
        state = hv * DIM * DIM * 4 + (TAPS - 1) * (2 * hk + hv) * DIM * 2
        row = 2 * ((2 * hk + 2 * hv) * DIM + hv * DIM)
        kept = min(self.rows, 64) * (2 * (2 * hk + hv) * DIM + 4 * ((hk + hv) * DIM + 2 * hv))
        return self.batch * (2 * state + self.rows * row + kept)


def _draw(heads: tuple[int, int], batch: int, rows: int) -> list[Tensor]:
    (hk, hv), entries = heads, 2 * batch
    channels = (2 * hk + hv) * DIM

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE).bfloat16()

    ints = partial(torch.tensor, dtype=torch.int32, device=DEVICE)
    stays = rows if rows > max(ROWS) else 1
    mask = torch.ones(rows, rows, dtype=torch.bool, device=DEVICE).tril()
    return [
        normal(batch * rows, channels + hv * DIM),
        normal(batch * rows, 2 * hv),
        normal(channels, 1, TAPS),
        torch.randn(hv, device=DEVICE) - 1,
        torch.randn(hv, device=DEVICE),
        normal(DIM),
        normal(entries, TAPS - 1, channels),
        torch.randn(entries, hv, DIM, DIM, device=DEVICE),
        ints(range(batch)),
        ints(range(batch, entries)),
        ints([stays] * batch),
        mask.expand(batch, -1, -1).contiguous(),
    ]


def _commit(heads: tuple[int, int], batch: int, moves: int) -> tuple[Callable[[], None], int]:
    """A commit of all layers at once, and its bytes by layer."""
    (hk, hv), rows = heads, moves + 1
    channels, width = (2 * hk + hv) * DIM, (hk + hv) * DIM + 2 * hv
    state = torch.randn(LAYERS, 2 * batch, hv, DIM, DIM, device=DEVICE)
    window = torch.randn(LAYERS, 2 * batch, TAPS - 1, channels, device=DEVICE).bfloat16()
    delta_rows = torch.randn(LAYERS, batch, rows, width, device=DEVICE) * 0.1
    delta_rows[..., -2 * hv :] = -0.1
    conv_rows = torch.randn(LAYERS, batch, rows, channels, device=DEVICE).bfloat16()
    entries = torch.arange(batch, 2 * batch, dtype=torch.int32, device=DEVICE)
    path = torch.arange(1, rows, dtype=torch.int32, device=DEVICE).expand(batch, -1).contiguous()

    def run() -> None:
        capi.commit_window(window, conv_rows, entries, path)
        capi.commit_delta(state, delta_rows, entries, path)

    windows, taken = 2 * (TAPS - 1) * channels * 2, min(moves, TAPS - 1) * channels * 2
    return run, batch * (2 * hv * DIM * DIM * 4 + moves * 4 * width + windows + taken)


def _copy(heads: tuple[int, int], batch: int) -> tuple[Callable[[], None], int]:
    """The states of each layer copied to the entries beside them, and their bytes by layer."""
    states = torch.randn(LAYERS, 2, batch, heads[1], DIM, DIM, device=DEVICE)

    def run() -> None:
        for read, write in states:
            write.copy_(read)

    return run, 2 * states[0, 0].nbytes


def _cell(run: Callable[[], object], num_bytes: int, bandwidth: float) -> str:
    us = 1e3 * median_ms(run) / LAYERS
    return f"{us:.2f} ({us / (1e6 * num_bytes / bandwidth):.2f})"


def _tables(heads: tuple[int, int], bandwidth: float) -> Iterator[str]:
    yield f"| B | copy | {' | '.join(f'{n} rows' for n in ROWS)} | commit of 1 | of 5 |"
    for batch in BATCHES:
        cells = [_cell(*_copy(heads, batch), bandwidth)]
        for rows in ROWS:
            layers = Layers.draw(heads, batch, rows)
            cells.append(_cell(layers.run, layers.num_bytes(), bandwidth))
        cells += [_cell(*_commit(heads, batch, moves), bandwidth) for moves in (1, 5)]
        yield f"| {batch} | {' | '.join(cells)} |"
    for rows in PROMPTS:
        layers = Layers.draw(heads, 1, rows)
        yield f"prompt of {rows}: {_cell(layers.run, layers.num_bytes(), bandwidth)}"


def _sweep(heads: tuple[int, int], bandwidth: float) -> Iterator[str]:
    """Blocks of a head, which the launcher chooses by itself, and with 0 tensor cores where it does
    (``kDeltaStepRows``).
    """
    for rows, batch in (
        (1, 1),
        (6, 1),
        (6, 8),
        (6, 32),
        (17, 1),
        (17, 8),
        (24, 1),
        (32, 1),
        (64, 8),
    ):
        layers = Layers.draw(heads, batch, rows)
        for blocks in (0, 1, 2, 4):
            run = partial(layers.run, blocks_per_head=blocks)
            what = f"rows {rows}, B {batch}, {blocks} blocks a head"
            yield f"{what}: {_cell(run, layers.num_bytes(), bandwidth)}"


@click.command(help=__doc__)
@click.option("--size", type=click.Choice([*GEOMETRIES]), default="9b", show_default=True)
@click.option("--sweep", is_flag=True, help="Blocks of a head, too.")
def main(size: str, sweep: bool) -> None:
    bandwidth, heads = copy_bandwidth(), GEOMETRIES[size]
    torch.manual_seed(0)
    name = torch.cuda.get_device_name()
    print(f"{name}, copy {bandwidth * 1e-12:.2f} TB/s, {size}: microseconds a layer (of its floor)")
    for line in _tables(heads, bandwidth):
        print(line, flush=True)
    for line in _sweep(heads, bandwidth) if sweep else ():
        print(line, flush=True)


if __name__ == "__main__":
    run_command(main)
