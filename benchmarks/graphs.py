"""Time and memory of writing the graphs of big pairs: ``python -m benchmarks.graphs``.

Uses sparse synthetic checkpoints of the 8B and 32B geometries. Each pair is measured in its own
process, from reading the checkpoints to the last graph on disk.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

__all__ = ["main"]


@click.command()
@click.option(
    "--size",
    "sizes",
    multiple=True,
    default=("8b", "32b"),
    help="A geometry of benchmarks/synthetic.py.",
)
@click.option("--child", hidden=True, type=click.Path(path_type=Path), nargs=2)
def main(sizes: tuple[str, ...], child: tuple[Path, Path] | None) -> None:
    """Print seconds, peak memory and bytes written per geometry."""
    if child:
        print(json.dumps(_measure(*child)))
        return
    table = Table("pair", "weights", "graphs on disk", "seconds", "peak memory")
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            pair = _write_pair(Path(folder) / size, size)
            found = json.loads(_child("--child", *pair))
            weights = sum(
                f.stat().st_size for directory in pair for f in directory.glob("*.safetensors")
            )
            table.add_row(
                f"Qwen3-VL-{size.upper()} + EAGLE-3",
                f"{weights / 1e9:.1f} GB",
                f"{found['num_bytes'] / 1e6:.2f} MB",
                f"{found['seconds']:.2f}",
                f"{found['peak_mb']:.0f} MB",
            )
    Console().print(table)


def _write_pair(folder: Path, size: str) -> tuple[Path, Path]:
    from benchmarks.synthetic import write_draft, write_target

    pair = folder / "target", folder / "draft"
    write_target(pair[0], size)
    write_draft(pair[1], size)
    return pair


def _child(*args: object) -> str:
    command = [sys.executable, "-m", "benchmarks.graphs", *map(str, args)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _measure(target: Path, draft: Path) -> dict[str, float]:
    """Read both checkpoints and write their graphs.

    Run in a fresh process: peak memory is the process's.
    """
    from trt_eagle3.checkpoint.draft import read_draft
    from trt_eagle3.config import EngineConfig
    from trt_eagle3.families.registry import read_target
    from trt_eagle3.graph.build_graphs import build_graphs

    start = time.perf_counter()
    spec = read_target(target)
    manifest = read_draft(draft, spec)
    num_bytes = 0
    for name, model in build_graphs(
        spec, manifest, EngineConfig(), lambda ref: ref.file.name
    ).items():
        num_bytes += (target / f"{name}.onnx").write_bytes(model.SerializeToString())
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "peak_mb": _peak_mb(), "num_bytes": num_bytes}


def _peak_mb() -> float:
    """Return the peak resident memory of this process (VmHWM).

    Unlike ru_maxrss, VmHWM excludes the parent's memory before the process started.
    """
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024 / 1e6


if __name__ == "__main__":
    main()
