"""TensorRT engines of a big target on one GPU: ``python -m benchmarks.tensorrt --size 2b
--lowering``, ``--size 30b-a3b --weights fp8``, ``--size qwen2.5-vl-7b``.

A published geometry in float16 with random weights (no checkpoint is needed). First the torch
session's steps. Then, where TensorRT is installed, the builder's time and memory, and the engine's
steps: medians of CUDA-event timings, captured. The floor is weight and KV
bytes over the copy bandwidth measured in the same run. ``--lowering`` also builds and times the
same graph without our plugins. ``--layers`` shortens the decoder if building all of it takes too
long: floors and times are then of those layers and the whole head. ``--weights`` quantises the
projections, which our plugins then multiply.
"""

from __future__ import annotations

import tempfile
from math import prod
from pathlib import Path

import click
import onnx
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.drawn_packed import draw_packed, weights_option
from benchmarks.drawn_weights import read_drawn, write_drawn
from benchmarks.lowering import lowered
from benchmarks.synthetic import target_sizes, write_target
from benchmarks.tensorrt_engine import build_beside_weights, build_line, no_tensorrt
from benchmarks.timing import copy_bandwidth, median_ms
from trt_eagle3.config import BuildConfig
from trt_eagle3.engine.builder.job import TreeSizes
from trt_eagle3.engine.bundle.record import REFERENCE_ROOT, reference_location
from trt_eagle3.engine.runtime.session import Session
from trt_eagle3.engine.torch.moe import Experts
from trt_eagle3.engine.torch.packed import PackedWeight
from trt_eagle3.engine.torch.program import Weight
from trt_eagle3.engine.torch.session import TorchSession
from trt_eagle3.engine.trt.bundle import uses_linear
from trt_eagle3.engine.trt.packed_file import PACKED_FILE
from trt_eagle3.engine.trt.packed_products import keep_packed_products
from trt_eagle3.engine.trt.profiles import graph_profiles
from trt_eagle3.engine.trt.session import TensorRTSession
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.residual import Residual
from trt_eagle3.graph.target import target_graph
from trt_eagle3.graph.trt_export import (
    WEIGHTS_FILE,
    TrtExport,
    trt_export,
    with_prefetch_safe,
)
from trt_eagle3.graph.weights import WeightExpr
from trt_eagle3.io.run_command import run_command
from trt_eagle3.spec import SparseMoe, TargetSpec

__all__ = ["main"]

_ROOM = 64  # rows after the context, if no more are requested
_AUX = (2, 14, 24)


@click.command()
@click.option("--size", type=click.Choice(target_sizes), default="2b", show_default=True)
@click.option(
    "--layers",
    type=click.IntRange(min=3),
    help="Decoder layers; default: those of the size.",
)
@click.option("--context", default=4096, show_default=True, help="Tokens in the cache.")
@click.option("--tokens", "sizes", multiple=True, type=int, default=(1, 16), show_default=True)
@click.option("--page-size", default=64, show_default=True)
@click.option("--level", type=int, help="engine.tensorrt.optimization_level.")
@click.option(
    "--residual", type=click.Choice(["compute", "float32"]), default="float32", show_default=True
)
@click.option(
    "--linear",
    type=click.Choice(["auto", "plugin", "tensorrt"]),
    default="auto",
    help="engine.tensorrt.linear.",
)
@weights_option
@click.option("--lowering", is_flag=True, help="Also the graph without our plugins.")
@click.option("--generation-only", is_flag=True, help="Omit the profile for prompts.")
@click.option(
    "--timing-cache",
    type=click.Path(path_type=Path),
    default=Path("timing.cache"),
    show_default=True,
)
def main(
    size: str,
    layers: int | None,
    context: int,
    sizes: tuple[int, ...],
    page_size: int,
    level: int | None,
    residual: str,
    linear: str,
    weights: str,
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
    room = max(_ROOM, *sizes)
    config = _config(size, context + room, engine)
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()  # the builder needs the memory of the copies
    projections = "float16" if weights == "bfloat16" else weights
    what = size if layers is None else f"{size} cut to {layers} layers"
    table = Table(
        f"{what}, float16, {projections} random weights, batch 1, kv {context}",
        "tokens",
        "ms",
        "floor ms",
        "ratio",
    )
    lines = [f"copy bandwidth {bandwidth / 1e12:.2f} TB/s; {torch.cuda.get_device_name()}"]
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        folder = Path(name)
        write_target(folder / "checkpoint", size, num_layers=layers)
        spec = read_target(folder / "checkpoint")
        aux = tuple(layer for layer in _AUX if layer < spec.num_layers)
        stream = Residual(wide=residual == "float32")
        model = target_graph(spec, aux, False, "float16", page_size, reference_location, stream)
        by_plugin = uses_linear(config.engine)
        ready = _with_drawn(trt_export(model, linear=by_plugin), folder, weights)
        profiles = graph_profiles(
            "target", model, config.engine, config.limits, TreeSizes(max(sizes), 1, max(sizes))
        )
        chosen = profiles[:1] if generation_only else profiles
        write_drawn(ready, folder / WEIGHTS_FILE)
        graphs = {
            "plugins+Linear" if by_plugin else "plugins": (with_prefetch_safe(ready.model), chosen)
        }
        if lowering:
            graphs["lowering"] = (
                lowered(trt_export(model).model, onnx.TensorProto.FLOAT16),
                profiles[:1],
            )

        def measure(kind: str, session: Session) -> None:
            steps = _Steps(session, spec, context, room, page_size)
            for tokens in sizes:
                ms = steps.median_ms(tokens)
                read = _weight_bytes(ready, folder, spec, tokens) + steps.cache_bytes
                floor = 1e3 * read / bandwidth
                row = (
                    f"target, {kind}",
                    str(tokens),
                    f"{ms:.3f}",
                    f"{floor:.3f}",
                    f"{ms / floor:.2f}",
                )
                table.add_row(*row)
                print(*row, sep="  ", flush=True)

        narrow = target_graph(
            spec, aux, False, "float16", page_size, reference_location, Residual(wide=False)
        )
        measure("torch session", _torch_session(narrow, folder, weights))
        torch.cuda.empty_cache()
        if reason := no_tensorrt():
            lines.append(f"no engines: {reason}")
            graphs = {}
        for kind, (graph, of_graph) in graphs.items():
            built, memory = build_beside_weights(
                folder / kind, graph, of_graph, config, timing_cache
            )
            lines.append(build_line(kind, built, memory))
            print(lines[-1], flush=True)
            measure(kind, TensorRTSession(folder / kind / "model.onnx", folder))
            torch.cuda.empty_cache()
    Console(width=110).print(table, *lines, sep="\n")


def _torch_session(model: onnx.ModelProto, folder: Path, weights: str) -> TorchSession:
    """Open a torch session over ``model`` with random weights of the kind ``weights``."""

    def read(expr: WeightExpr, root: Path, device: torch.device) -> Weight:
        packed = draw_packed(expr, weights, device)
        return read_drawn(expr, root, device) if packed is None else packed

    file = folder / "torch.onnx"
    file.write_bytes(model.SerializeToString())
    return TorchSession(file, REFERENCE_ROOT, device="cuda", read_weight=read)


def _with_drawn(ready: TrtExport, folder: Path, weights: str) -> TrtExport:
    """Return ``ready`` with random projections of the kind ``weights``."""
    if weights == "bfloat16":
        return ready

    def drawn(expr: WeightExpr, root: Path, device: torch.device) -> PackedWeight | None:
        del root
        made = draw_packed(expr, weights, device)
        return made if isinstance(made, PackedWeight) else None

    def drawn_experts(
        exprs: tuple[WeightExpr, WeightExpr], root: Path, device: torch.device
    ) -> tuple[Experts, Experts] | None:
        del root
        gate_up, down = (draw_packed(expr, weights, device) for expr in exprs)
        if isinstance(gate_up, Experts) and isinstance(down, Experts):
            return gate_up, down
        return None

    return keep_packed_products(ready, folder, folder, pack=drawn, pack_experts=drawn_experts)


def _weight_bytes(ready: TrtExport, folder: Path, spec: TargetSpec, tokens: int) -> float:
    """Return the bytes of weights that a step of ``tokens`` reads.

    Of experts it reads those that a token is expected to go through, if all are as likely.
    """
    packed = folder / PACKED_FILE  # WEIGHTS_FILE has holes in place of these weights
    total = ready.weight_bytes + (packed.stat().st_size if packed.exists() else 0)
    moe = next((layer.mlp for layer in spec.layers if isinstance(layer.mlp, SparseMoe)), None)
    if moe is None:
        return total
    known = {proto.name: proto for proto in ready.model.graph.initializer}
    experts: int = sum(
        prod(known[name].dims)
        * onnx.helper.tensor_dtype_to_np_dtype(known[name].data_type).itemsize
        for node in ready.model.graph.node
        if node.op_type.startswith("FusedMoe")
        for name in node.input[2:]
    )
    unread: float = (1 - moe.top_k / moe.num_experts) ** tokens
    return total - unread * experts


def _config(size: str, max_seq_len: int, engine: dict[str, object]) -> BuildConfig:
    limits = {"max_seq_len": max_seq_len}
    return BuildConfig.model_validate(
        {"name": size, "target": {"checkpoint": size}, "engine": engine, "limits": limits}
    )


class _Steps:
    """One sequence with ``context`` rows in its cache, and steps of up to ``room`` rows."""

    def __init__(
        self, session: Session, spec: TargetSpec, context: int, room: int, page_size: int
    ) -> None:
        self._session = session
        self._spec = spec
        self._context = context
        pages = -(-(context + room) // page_size)
        shape = (
            2,
            spec.num_layers,
            (pages + 1) * page_size,
            spec.attention.num_kv_heads,
            spec.attention.head_dim,
        )
        self._cache = torch.randn(shape, dtype=torch.float16, device="cuda")
        self.cache_bytes = 2 * 2 * spec.num_layers * context * spec.attention.kv_width
        buffers = self._cache.flatten(0, 1)
        for state, buffer in zip(session.states, buffers, strict=True):
            session.bind(state.name, buffer)
            session.bind(state.output_name, buffer)
        self._pages = (1 + torch.randperm(pages, dtype=torch.int32))[None]

    def inputs(self, tokens: int) -> dict[str, Tensor]:
        """Return inputs of a chain of ``tokens`` after the context."""
        hidden, levels = self._spec.hidden_size, self._spec.num_visual_levels
        deepstack = {
            "deepstack_embeds": torch.zeros(
                levels, 1, tokens, hidden, dtype=torch.float16, device="cuda"
            )
        }
        positions = torch.arange(self._context, self._context + tokens, dtype=torch.int32)
        return {
            "inputs_embeds": torch.randn(1, tokens, hidden, dtype=torch.float16, device="cuda"),
            **(deepstack if levels else {}),
            "position_ids": positions.expand(3, 1, -1).contiguous(),
            "past_lengths": torch.tensor([self._context], dtype=torch.int32),
            "query_lengths": torch.tensor([tokens], dtype=torch.int32),
            "page_table": self._pages,
            "tree_mask": torch.ones(1, tokens, tokens, dtype=torch.bool).tril(),
            "logit_rows": torch.arange(tokens, dtype=torch.int32)[None],
        }

    def median_ms(self, tokens: int) -> float:
        """Return the median time of a captured step."""
        inputs = self.inputs(tokens)
        found = self._session.run(inputs)
        assert torch.isfinite(found["logits"]).all(), "the engine's logits are not finite"
        return median_ms(lambda: self._session.run(inputs))


if __name__ == "__main__":
    run_command(main)
