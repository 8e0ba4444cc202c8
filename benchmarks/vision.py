"""Time and memory of the vision tower on one GPU: ``python -m benchmarks.vision``.

The tower of a published geometry with random weights (no checkpoint is needed), through the torch
session with our kernels. The same weights run in transformers (sdpa) for comparison. Every output
is compared before it is timed. The floor counts the operations of matrix and attention products, at
600 TFLOP/s.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.drawn_weights import draw_weight
from benchmarks.synthetic import size_option, write_target
from benchmarks.timing import copy_bandwidth, median_ms
from benchmarks.vision_tower import Tower, tower_flops
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.decode.request.vision_encoder import PatchBuckets, VisionRunner
from trt_eagle3.errors import EngineFailedError
from trt_eagle3.families.qwen3_vl.vision_rows import padded_rows
from trt_eagle3.families.registry import read_target, tower_of
from trt_eagle3.io.run_command import run_command
from trt_eagle3.parity.metrics import relative_error

__all__ = ["CASES", "main"]

CASES: dict[str, list[tuple[int, int, int]]] = {
    "512 x 512": [(1, 32, 32)],
    "1024 x 1024": [(1, 64, 64)],
    "4 of 1024 x 1024": [(1, 64, 64)] * 4,
    "2048 x 2048": [(1, 128, 128)],
    "16 frames of 448 x 448": [(8, 28, 28)],
    "photo 4032 x 3024": [(1, 188, 252)],
}
"""Grids in patches of 16 x 16 x 2, as made by Qwen3-VL's processor."""

_FLOOR_FLOPS = 600e12
# Two bfloat16 towers that round in another order: measured 8e-3 to 2e-2 over 24 and 27 layers of
# random weights.
_TOLERANCE = 5e-2


@dataclass(frozen=True)
class _Towers:
    """Our tower and transformers' with the same weights."""

    spec: TargetCheckpoint
    ours: VisionRunner
    theirs: Any


@click.command()
@size_option
@click.option(
    "--dtype", default="bfloat16", show_default=True, type=click.Choice(["bfloat16", "float16"])
)
@click.option(
    "--case",
    "cases",
    multiple=True,
    type=click.Choice(list(CASES)),
    help="Only these cases; default: all.",
)
@click.option(
    "--profile", is_flag=True, help="Also print the time of each kernel by case, by name."
)
def main(size: str, dtype: str, cases: tuple[str, ...], profile: bool) -> None:
    """Print the tower's time and transformers', the floor, and peak memory without weights."""
    columns = ("ms", "transformers ms", "ratio", "floor ms", "GB", "error")
    table = Table(f"vision tower, {size}, {dtype}, random weights", *columns)
    bandwidth = copy_bandwidth()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        towers = _towers(Path(folder), size, dtype)
        for name in cases or CASES:
            table.add_row(name, *_row(towers, CASES[name], dtype))
            if profile:
                _print_profile(name, _run_of(towers, CASES[name], dtype)[0])
    Console(width=110).print(
        table, f"copy bandwidth {bandwidth / 1e12:.2f} TB/s; {torch.cuda.get_device_name()}"
    )


def _towers(folder: Path, size: str, dtype: str, device: str = "cuda") -> _Towers:
    from transformers import AutoConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    write_target(folder / "target", size)
    spec = read_target(folder / "target")
    config = AutoConfig.from_pretrained(folder / "target").vision_config
    config._attn_implementation = "sdpa"
    with torch.device(device):
        theirs = Qwen3VLVisionModel(config).to(getattr(torch, dtype)).eval()
    theirs.load_state_dict(
        {name: _drawn(name, like, device) for name, like in theirs.state_dict().items()}
    )
    merge = spec.require_vision().spatial_merge_size
    session = Tower(spec, folder, device).session(dtype)
    buckets = PatchBuckets(1 << 20, merge**2, padded_rows)
    runner = VisionRunner(session, merge_size=merge, buckets=buckets)
    return _Towers(spec, runner, theirs)


def _drawn(name: str, like: Tensor, device: str) -> Tensor:
    """Return the checkpoint's tensor; a convolution's kernel is a row of our product."""
    shape = like.shape if like.ndim == 1 else like.flatten(1).shape
    return draw_weight(f"model.visual.{name}", shape, device).reshape(like.shape)


def _run_of(
    towers: _Towers, grids: list[tuple[int, int, int]], dtype: str
) -> tuple[Callable[[], Any], Tensor, Tensor]:
    """Return a run of our tower over random patches, the patches and the grids."""
    grid = torch.tensor(grids)
    count, vision = int(grid.prod(1).sum()), towers.spec.require_vision()
    patches = torch.randn(count, vision.patch_dim, dtype=getattr(torch, dtype), device="cuda")
    rows = tower_of(towers.spec).inputs(vision, grid)
    return lambda: towers.ours.forward(patches, rows), patches, grid


def _row(towers: _Towers, grids: list[tuple[int, int, int]], dtype: str) -> tuple[str, ...]:
    run, patches, grid = _run_of(towers, grids, dtype)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    embeds = run()[0]
    peak = torch.cuda.max_memory_allocated() - before
    on_device = grid.cuda()
    error = relative_error(embeds, towers.theirs(patches, grid_thw=on_device).pooler_output)
    if not error < _TOLERANCE:
        raise EngineFailedError(
            f"{grids}: visual embeddings differ from transformers' by {error:.1e}. It is not timed."
        )
    ours = median_ms(run)
    theirs = median_ms(lambda: towers.theirs(patches, grid_thw=on_device))
    floor = 1e3 * tower_flops(towers.spec, grid) / _FLOOR_FLOPS
    return (
        f"{ours:.2f}",
        f"{theirs:.1f}",
        f"{theirs / ours:.2f}",
        f"{floor:.1f}",
        f"{peak / 1e9:.2f}",
        f"{error:.1e}",
    )


def _print_profile(name: str, run: Callable[[], Any]) -> None:
    """Print the device time of one run, by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            run()
        torch.cuda.synchronize()
    table = Table(f"kernels, {name}", "us a run", "launches")
    for event in sorted(profiler.key_averages(), key=lambda e: -e.device_time_total)[:12]:
        table.add_row(
            event.key[:70], f"{event.device_time_total / 5:.0f}", f"{event.count / 5:.0f}"
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    run_command(main)
