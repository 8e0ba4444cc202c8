"""Vision towers of every family on one GPU: ``python -m benchmarks.tensorrt_vision``.

Published geometries in float16 with random weights (no checkpoint is needed). For each geometry:
transformers, the torch session, and where TensorRT is installed, an engine with our plugin and an
engine of standard operators for the smallest images. Prints medians of CUDA-event timings. Every
output is compared with the torch session's in float32 before its run is timed. A wrong output is
not timed, and the command exits with status 1. The floor is the products' operations over the rate
of a large float16 product measured in the same run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import onnx
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.drawn_weights import write_drawn
from benchmarks.lowering import lowered
from benchmarks.synthetic import target_sizes, write_target
from benchmarks.tensorrt_engine import build_beside_weights, build_line, no_tensorrt
from benchmarks.timing import matmul_rate, median_ms
from benchmarks.vision_tower import ImageBatch, Tower, TransformersTower, tower_flops
from trt_eagle3.config import BuildConfig
from trt_eagle3.engine.builder.job import TreeSizes
from trt_eagle3.engine.runtime.session import Session
from trt_eagle3.engine.trt.profiles import graph_profiles
from trt_eagle3.engine.trt.session import TensorRTSession
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import read_target, tower_of
from trt_eagle3.graph.trt_export import WEIGHTS_FILE, trt_export
from trt_eagle3.io.run_command import run_command

__all__ = ["main"]

# Largest relative error of an output. On a CPU, with images of 128^2, the torch session in float16
# has an error of 3e-3 at 2B geometry. Exchanged rope axes, and a frame that sees 4 patches of its
# neighbour, have 0.7; a scale that is 5 % off has 0.09.
_TOLERANCE = 3e-2
_BLOCK = 32  # pixels along a visual token
_TEXT_LAYERS = 3  # decoder layers of the checkpoint: at least the number of deepstack levels


@dataclass(frozen=True)
class _Row:
    """Result of one engine and images; ``ms`` is None if an output is wrong."""

    tower: str
    engine: str
    images: ImageBatch
    patches: int
    error: float
    floor_ms: float
    ms: float | None = None

    def cells(self) -> tuple[str, ...]:
        """Return table cells; ``_COLUMNS`` names them."""
        ms = "wrong" if self.ms is None else f"{self.ms:.2f}"
        ratio = "" if self.ms is None else f"{self.ms / self.floor_ms:.1f}"
        return (
            self.tower,
            self.engine,
            str(self.images),
            str(self.patches),
            ms,
            f"{self.floor_ms:.2f}",
            ratio,
            f"{self.error:.1e}",
        )


_COLUMNS = ("tower", "engine", "images", "patches", "ms", "floor ms", "ratio", "error")


@click.command()
@click.option(
    "--size",
    "sizes",
    multiple=True,
    type=click.Choice(target_sizes),
    default=("2b", "8b"),
    show_default=True,
)
@click.option(
    "--side",
    "sides",
    multiple=True,
    type=click.IntRange(min=_BLOCK),
    default=(512, 1024, 2048),
    show_default=True,
)
@click.option("--level", type=int, help="engine.tensorrt.optimization_level.")
@click.option(
    "--lowering/--no-lowering",
    default=True,
    help="Also an engine without our plugin, for the smallest side.",
)
@click.option("--engines/--no-engines", default=True, help="Engines, where TensorRT is installed.")
@click.option(
    "--timing-cache",
    type=click.Path(path_type=Path),
    default=Path("timing.cache"),
    show_default=True,
)
def main(
    sizes: tuple[str, ...],
    sides: tuple[int, ...],
    level: int | None,
    lowering: bool,
    engines: bool,
    timing_cache: Path,
) -> None:
    """Print build times, tower times, floors and ratios."""
    if odd := [side for side in sides if side % _BLOCK]:
        raise UserError(f"--side: expected multiples of {_BLOCK}, got {odd[0]}")
    rate = matmul_rate()
    images = [ImageBatch(1, side) for side in sorted(sides)] + [ImageBatch(4, min(sides))]
    rows: list[_Row] = []
    lines = [
        f"float16 products {rate / 1e12:.0f} TFLOP/s; {torch.cuda.get_device_name()}; random "
        "weights"
    ]
    for size in sizes:
        with tempfile.TemporaryDirectory() as name, torch.inference_mode():
            bench = _Bench(size, Path(name), images, level, timing_cache, rate)
            found = bench.rows(engines=engines, lowering=lowering)
            for row in found:
                print(*row.cells(), sep="  ", flush=True)
                rows.append(row)
            lines += bench.lines
    table = Table(*_COLUMNS, title="Vision towers, float16")
    for row in rows:
        table.add_row(*row.cells())
    Console(width=120).print(table, *lines, sep="\n")
    if any(row.ms is None for row in rows):
        raise click.exceptions.Exit(1)


class _Bench:
    """One tower. ``lines``: the cost of its builds, or why there is no engine."""

    def __init__(
        self,
        size: str,
        folder: Path,
        images: Sequence[ImageBatch],
        level: int | None,
        timing_cache: Path,
        rate: float,
    ) -> None:
        write_target(folder / "checkpoint", size, num_layers=_TEXT_LAYERS)
        self.lines: list[str] = []
        self._size = size
        self._folder = folder
        self._images = images
        self._level = level
        self._timing_cache = timing_cache
        self._rate = rate
        self._tower = Tower(read_target(folder / "checkpoint"), folder)

    def rows(self, *, engines: bool, lowering: bool) -> Iterator[_Row]:
        """Yield rows as they are measured."""
        tower = self._tower
        tower.expect(self._images)
        torch.cuda.empty_cache()  # the builder needs it
        yield from self._transformers()
        torch.cuda.empty_cache()
        yield from self._measure("torch session", tower.session("float16"), self._images)
        if not engines:
            return
        if reason := no_tensorrt():
            self._note(f"no engines: {reason}")
            return
        model = tower.graph("float16")
        ready = trt_export(model)
        write_drawn(ready, self._folder / WEIGHTS_FILE)
        yield from self._measure_engine("plugin", model, ready.model, self._images)
        if lowering:
            standard = lowered(ready.model, onnx.TensorProto.FLOAT16)
            yield from self._measure_engine("lowering", model, standard, self._images[:1])

    def _measure_engine(
        self,
        kind: str,
        model: onnx.ModelProto,
        exported: onnx.ModelProto,
        images: Sequence[ImageBatch],
    ) -> Iterator[_Row]:
        torch.cuda.empty_cache()
        config = self._config(images)
        spec, most = self._tower.spec, config.limits.max_visual_tokens
        ranges = tower_of(spec).ranges(spec.require_vision(), most)
        profiles = graph_profiles(
            "vision", model, config.engine, config.limits, TreeSizes(), ranges
        )
        folder = self._folder / kind
        try:
            built, memory = build_beside_weights(
                folder, exported, profiles, config, self._timing_cache
            )
            session = TensorRTSession(folder / "model.onnx", folder)
        except UserError as error:  # continue with the other engines
            self._note(f"{self._size}, {kind}: no engine: {error}")
            return
        tokens = config.limits.max_visual_tokens
        self._note(build_line(f"{self._size}, {kind}, max_visual_tokens {tokens}", built, memory))
        yield from self._measure(f"TensorRT, {kind}", session, images)

    def _transformers(self) -> Iterator[_Row]:
        theirs = TransformersTower(self._tower.spec, self._size, "float16")
        for images in self._images:
            patches = self._tower.inputs(images, torch.float16)["patches"]
            run = theirs.run(patches, images.grids(self._tower.spec))
            error = self._tower.embeds_error(run(), images)
            yield self._row("transformers", images, error, run)

    def _measure(
        self, engine: str, session: Session, images: Sequence[ImageBatch]
    ) -> Iterator[_Row]:
        for each in images:
            error = self._tower.error(session, each, torch.float16)
            inputs = self._tower.inputs(each, torch.float16)
            yield self._row(engine, each, error, partial(session.run, inputs))

    def _row(
        self, engine: str, images: ImageBatch, error: float, run: Callable[[], object]
    ) -> _Row:
        spec = self._tower.spec
        floor = 1e3 * tower_flops(spec, images.grids(spec)) / self._rate
        ms = median_ms(run) if error < _TOLERANCE else None
        return _Row(self._size, engine, images, images.patches(spec), error, floor, ms)

    def _config(self, images: Sequence[ImageBatch]) -> BuildConfig:
        """Return a config with limits for the largest of these images."""
        spec = self._tower.spec
        merge = spec.require_vision().spatial_merge_size
        most = max(each.patches(spec) for each in images) // merge**2
        engine = {"backend": "tensorrt", "tensorrt": {"optimization_level": self._level}}
        target = {"checkpoint": self._size}
        limits = {"max_visual_tokens": most}
        return BuildConfig.model_validate(
            {"name": self._size, "target": target, "engine": engine, "limits": limits}
        )

    def _note(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)


if __name__ == "__main__":
    run_command(main)
