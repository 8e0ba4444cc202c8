"""Cost of the streamed reference at a published geometry: ``python -m benchmarks.reference --size
8b``.

Runs the first layers of a synthetic checkpoint (zeros; values do not change the work) in a fresh
process. Memory is peak resident memory minus that before the run. Times are ratios within the run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

__all__ = ["main"]


@click.command()
@click.option("--size", default="8b", show_default=True, help="Geometry (benchmarks/synthetic.py).")
@click.option("--rows", default=512, show_default=True, help="Rows of the sequence.")
@click.option("--layers", default=4, show_default=True, help="Decoder layers to run.")
@click.option("--child", hidden=True, type=click.Path(path_type=Path))
def main(size: str, rows: int, layers: int, child: Path | None) -> None:
    """Print memory, and the share of time that streaming takes."""
    if child:
        print(json.dumps(_measure(child, rows, layers)))
        return
    from benchmarks.synthetic import write_target

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "target"
        write_target(target, size)
        weights = sum(f.stat().st_size for f in target.glob("*.safetensors"))
        arguments = ["--rows", str(rows), "--layers", str(layers), "--child", str(target)]
        command = [sys.executable, "-m", "benchmarks.reference", *arguments]
        found = json.loads(
            subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        )
    table = Table(f"streamed reference, {size}, {rows} rows, float32", "")
    table.add_row("its weights in float32", f"{2 * weights / 1e9:.1f} GB")
    table.add_row("one decoder layer in float32", f"{found['layer_bytes'] / 1e9:.2f} GB")
    table.add_row(
        f"peak over {layers} layers, head and vision tower", f"{found['peak'] / 1e9:.2f} GB"
    )
    table.add_row(
        "loading a layer, share of its time", f"{100 * found['load'] / found['layer']:.0f} %"
    )
    table.add_row("a layer of 8 prompts in one load to 8 loads", f"{found['together']:.2f}")
    table.add_row("all layers to one", f"{found['num_layers']:.0f}")
    table.add_row("head over 32 rows to one layer", f"{found['head'] / found['layer']:.2f}")
    table.add_row(
        "vision tower over 1024 patches to one layer", f"{found['vision'] / found['layer']:.2f}"
    )
    Console().print(table)


def _measure(target: Path, rows: int, layers: int) -> dict[str, float]:
    """Measure in a fresh process: the peak is the process's."""
    import torch

    from trt_eagle3.families.registry import read_target
    from trt_eagle3.parity.reference.target import load_reference

    spec = read_target(target)
    reference, hidden = load_reference(spec, torch.float32, "cpu"), spec.hidden_size
    before, timed = _resident("VmRSS"), dict[str, float]()
    rope = reference.rope(torch.arange(rows).expand(3, -1))
    state = torch.randn(rows, hidden)
    start = time.perf_counter()
    load = run = 0.0
    for layer in reference.layers(range(layers)):
        loaded = time.perf_counter()
        load += loaded - start
        state = layer(state, rope)
        start = time.perf_counter()
        run += start - loaded
        layer_bytes = layer.num_bytes
    part = rows // 8
    start = time.perf_counter()
    for _ in range(8):
        (layer,) = reference.layers([0])
        layer(state[:part], reference.rope(torch.arange(part).expand(3, -1)))
    alone = time.perf_counter() - start
    timed["head"] = _seconds(lambda: reference.head(state[:32]))
    grid = torch.tensor([[1, 32, 32]])
    patches = torch.randn(1024, spec.require_vision().patch_dim)
    timed["vision"] = _seconds(lambda: reference.vision(patches, grid))
    per_layer = (load + run) / layers
    return {
        **timed,
        "layer": per_layer,
        "load": load / layers,
        "together": per_layer / alone,
        "layer_bytes": layer_bytes,
        "num_layers": reference.num_layers,
        "peak": _resident("VmHWM") - before,
    }


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _resident(name: str) -> int:
    """Return resident bytes of this process: now (``VmRSS``) or at most (``VmHWM``)."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[name].split()[0]) * 1024


if __name__ == "__main__":
    main()
