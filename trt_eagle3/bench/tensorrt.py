"""TensorRT engines of a big target on one GPU: ``python -m trt_eagle3.bench.tensorrt --size 2b --lowering``.

A published geometry in float16 with random weights (no checkpoint is needed): how long the builder takes and how much
memory, then medians of CUDA-event timings of captured steps. The floor is weight and KV bytes over the copy bandwidth
measured in the same run. ``--lowering`` also builds and times the same graph without our plugins. ``--layers`` cuts the
decoder short where a build of all of it takes too long: floors and times are then of those layers and the whole head.
"""

from __future__ import annotations

import json
import resource
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import click
import onnx
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from trt_eagle3.atomic_io import write_file
from trt_eagle3.bench.lowering import lowered
from trt_eagle3.bench.synthetic import SIZES, write_target
from trt_eagle3.bench.timing import copy_bandwidth, median_ms
from trt_eagle3.checkpoint.target import TargetSpec
from trt_eagle3.checkpoint.target_reader import read_target
from trt_eagle3.command import run_command
from trt_eagle3.config import BuildConfig
from trt_eagle3.engine.bundle import reference_location
from trt_eagle3.engine.tensorrt import TensorRTSession
from trt_eagle3.engine.tensorrt_build import Built, build_engine
from trt_eagle3.engine.tensorrt_facts import ENGINE_FILE, machine_facts
from trt_eagle3.engine.tensorrt_profiles import Profile, TreeSizes, graph_profiles
from trt_eagle3.engine.tensorrt_versions import uses_linear
from trt_eagle3.graph.plugin_ready import WEIGHTS_FILE, PluginReady, plugin_ready, reading_early
from trt_eagle3.graph.residual import Residual
from trt_eagle3.graph.target import target_graph

__all__ = ["main"]

_ROOM = 64  # rows after the context
_AUX = (2, 14, 24)


@dataclass(frozen=True)
class _Memory:
    """Most memory taken while something ran: of the host (bytes of this process), of the GPU (all of it)."""

    host: int
    device: int


@click.command()
@click.option("--size", type=click.Choice(list(SIZES)), default="2b", show_default=True)
@click.option("--layers", type=click.IntRange(min=3), help="Only so many decoder layers; as many as the size has.")
@click.option("--context", default=4096, show_default=True, help="Tokens in the cache.")
@click.option("--tokens", "sizes", multiple=True, type=int, default=(1, 16), show_default=True)
@click.option("--page-size", default=64, show_default=True)
@click.option("--level", type=int, help="engine.tensorrt.optimization_level.")
@click.option("--residual", type=click.Choice(["compute", "float32"]), default="float32", show_default=True)
@click.option(
    "--linear", type=click.Choice(["auto", "plugin", "tensorrt"]), default="auto", help="engine.tensorrt.linear."
)
@click.option("--lowering", is_flag=True, help="Also the graph without our plugins.")
@click.option("--generation-only", is_flag=True, help="Leave out the profile for prompts.")
@click.option("--timing-cache", type=click.Path(path_type=Path), default=Path("timing.cache"), show_default=True)
def main(
    size: str,
    layers: int | None,
    context: int,
    sizes: tuple[int, ...],
    page_size: int,
    level: int | None,
    residual: str,
    linear: str,
    lowering: bool,
    generation_only: bool,
    timing_cache: Path,
) -> None:
    """Print build times, step times, floors and ratios."""
    engine = {
        "backend": "tensorrt",
        "page_size": page_size,
        "residual": residual,
        "tensorrt": {"optimization_level": level, "linear": linear},
    }
    config = _config(size, context + _ROOM, engine)
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()  # the builder wants what the copies took
    whole = SIZES[size][1]
    what = size if layers is None else f"{size} cut to {layers} of {whole} layers"
    table = Table(f"{what}, float16, batch 1, random weights, kv {context}", "tokens", "ms", "floor ms", "ratio")
    lines = [f"copy bandwidth {bandwidth / 1e12:.2f} TB/s; {torch.cuda.get_device_name()}"]
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        folder = Path(name)
        write_target(folder / "checkpoint", size, num_layers=layers)
        spec = read_target(folder / "checkpoint")
        aux = tuple(layer for layer in _AUX if layer < spec.text.num_layers)
        stream = Residual(wide=residual == "float32")
        model = target_graph(spec, aux, False, "float16", page_size, reference_location, stream)
        by_plugin = uses_linear(config.engine)
        ready = plugin_ready(model, linear=by_plugin)
        profiles = graph_profiles("target", model, config, TreeSizes(max(sizes), 1, max(sizes)), 2)
        chosen = profiles[:1] if generation_only else profiles
        _write_random(ready, folder / WEIGHTS_FILE)
        graphs = {"plugins+Linear" if by_plugin else "plugins": (reading_early(ready.model), chosen)}
        if lowering:
            graphs["lowering"] = (lowered(plugin_ready(model).model, onnx.TensorProto.FLOAT16), profiles[:1])
        for kind, (graph, of_graph) in graphs.items():
            built, memory = _build(folder / kind, graph, of_graph, config, timing_cache)
            lines.append(_build_line(kind, built, memory))
            print(lines[-1], flush=True)
            session = TensorRTSession(folder / kind / "model.onnx", folder)
            steps = _Steps(session, spec, context, page_size)
            floor = 1e3 * (ready.weight_bytes + steps.cache_bytes) / bandwidth
            for tokens in sizes:
                ms = steps.median_ms(tokens)
                row = (f"target, {kind}", str(tokens), f"{ms:.3f}", f"{floor:.3f}", f"{ms / floor:.2f}")
                table.add_row(*row)
                print(*row, sep="  ", flush=True)
            del session, steps
            torch.cuda.empty_cache()
    Console(width=110).print(table, *lines, sep="\n")


def _config(size: str, max_seq_len: int, engine: dict[str, object]) -> BuildConfig:
    limits = {"max_seq_len": max_seq_len}
    return BuildConfig.model_validate(
        {"name": size, "target": {"checkpoint": size}, "engine": engine, "limits": limits}
    )


def _config_json(config: BuildConfig, **facts: object) -> bytes:
    """An engine folder's ``config.json``, as far as a session reads it."""
    return json.dumps({"build_config": config.model_dump(mode="json"), **facts}).encode()


def _build(
    folder: Path, graph: onnx.ModelProto, profiles: list[Profile], config: BuildConfig, timing_cache: Path
) -> tuple[Built, _Memory]:
    """Build ``graph``, whose weights lie one folder up."""
    folder.mkdir()
    (folder / WEIGHTS_FILE).hardlink_to(folder.parent / WEIGHTS_FILE)
    write_file(folder / "model.onnx", graph.SerializeToString())
    with _Watch() as watch:
        built = build_engine(folder / "model.onnx", folder / ENGINE_FILE, profiles, config.engine, timing_cache)
    facts = machine_facts(built.num_bytes).model_dump()
    write_file(folder / "config.json", _config_json(config, engine=facts))
    return built, watch.memory


def _build_line(kind: str, built: Built, memory: _Memory) -> str:
    return (
        f"{kind}: built in {built.seconds:.0f} s, engine {built.num_bytes / 1e9:.2f} GB, {built.num_layers} layers of "
        f"which {built.num_plugins} are plugins, activations {built.device_bytes / 1e6:.0f} MB; while building "
        f"{memory.host / 1e9:.1f} GB of host and {memory.device / 1e9:.1f} GB of device memory"
    )


class _Watch:
    """Looks at the memory while something runs."""

    def __enter__(self) -> _Watch:
        self._start, _ = torch.cuda.mem_get_info()
        self._least = self._start
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.2):
            self._least = min(self._least, torch.cuda.mem_get_info()[0])

    @property
    def memory(self) -> _Memory:
        return _Memory(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, self._start - self._least)


def _write_random(ready: PluginReady, file: Path) -> None:
    """Weights like a trained model's in size: norms near one, matrices of unit gain."""
    with file.open("wb") as stream:
        for weight in ready.weights:
            stream.seek(ready.offsets[weight.name])
            drawn = torch.randn(weight.shape, dtype=torch.float16, device="cuda")
            scale = weight.parts[-1].scale
            values = 1 + 0.1 * drawn if len(weight.shape) == 1 else drawn * (scale * weight.shape[-1] ** -0.5)
            stream.write(values.flatten().view(torch.uint8).cpu().numpy().tobytes())


class _Steps:
    """One sequence with ``context`` rows in its cache, and steps of several sizes after them."""

    def __init__(self, session: TensorRTSession, spec: TargetSpec, context: int, page_size: int) -> None:
        text = spec.text
        self._session = session
        self._spec = spec
        self._context = context
        pages = -(-(context + _ROOM) // page_size)
        shape = (2, text.num_layers, (pages + 1) * page_size, text.num_kv_heads, text.head_dim)
        self._cache = torch.randn(shape, dtype=torch.float16, device="cuda")
        self.cache_bytes = 2 * 2 * text.num_layers * context * text.num_kv_heads * text.head_dim
        for side, name in enumerate("kv"):
            for layer in range(text.num_layers):
                session.bind(f"{name}_cache.{layer}", self._cache[side, layer])
                session.bind(f"{name}_cache_out.{layer}", self._cache[side, layer])
        self._pages = (1 + torch.randperm(pages, dtype=torch.int32))[None]

    def inputs(self, tokens: int) -> dict[str, Tensor]:
        """A chain of ``tokens`` after the context."""
        hidden, levels = self._spec.text.hidden_size, self._spec.num_deepstack
        positions = torch.arange(self._context, self._context + tokens, dtype=torch.int32)
        return {
            "inputs_embeds": torch.randn(1, tokens, hidden, dtype=torch.float16, device="cuda"),
            "deepstack_embeds": torch.zeros(levels, 1, tokens, hidden, dtype=torch.float16, device="cuda"),
            "position_ids": positions.expand(3, 1, -1).contiguous(),
            "past_lengths": torch.tensor([self._context], dtype=torch.int32),
            "query_lengths": torch.tensor([tokens], dtype=torch.int32),
            "page_table": self._pages,
            "tree_mask": torch.ones(1, tokens, tokens, dtype=torch.bool).tril(),
            "logit_rows": torch.arange(tokens, dtype=torch.int32)[None],
        }

    def median_ms(self, tokens: int) -> float:
        """Of a captured step."""
        inputs = self.inputs(tokens)
        found = self._session.run(inputs)
        assert torch.isfinite(found["logits"]).all(), "the engine's logits are not finite"
        return median_ms(lambda: self._session.run(inputs))


if __name__ == "__main__":
    run_command(main)
