"""Step times of a big pair on one GPU: ``python -m trt_eagle3.bench.gpu``.

Graphs of a published geometry in bfloat16 with random weights (no checkpoint is needed), through
the torch session with our kernels. Medians of CUDA-event timings of captured steps; the floor is
weight and KV bytes over the copy bandwidth measured in the same run. Whole cycles are timed on the
host's clock over the real loop.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from trt_eagle3.bench.synthetic import write_draft, write_target
from trt_eagle3.bench.timing import copy_bandwidth, median_ms
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.config import EngineConfig, SpeculationConfig
from trt_eagle3.decode.decoder import Decoder, Drafting
from trt_eagle3.decode.kv_cache import PagePool
from trt_eagle3.decode.prompt import Prompt
from trt_eagle3.decode.propose import Proposer
from trt_eagle3.decode.runner import AttentionMetadata, DraftRunner, TargetRunner, causal_mask
from trt_eagle3.decode.sequence import SequenceState
from trt_eagle3.decode.state import layer_states
from trt_eagle3.decode.tree import static_tree
from trt_eagle3.engine.bundle import REFERENCE_ROOT, reference_location
from trt_eagle3.engine.embedding import EmbeddingTable
from trt_eagle3.engine.torch.session import TorchSession
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.build_graphs import build_graphs
from trt_eagle3.graph.weights import WeightExpr
from trt_eagle3.io.run_command import run_command

__all__ = ["main"]

_DEVICE = "cuda"
_REPEATS = 30
_ROOM = 1024  # tokens after the context


@dataclass(frozen=True)
class _Pair:
    """Runners over random weights."""

    spec: TargetCheckpoint
    manifest: DraftManifest
    target: TargetRunner
    draft: DraftRunner
    pool: PagePool


@click.command()
@click.option("--size", default="8b", show_default=True, help="Geometry (bench/synthetic.py).")
@click.option(
    "--context", "contexts", multiple=True, type=int, default=(1024, 16384), show_default=True
)
@click.option("--page-size", default=16, show_default=True)
@click.option(
    "--profile", is_flag=True, help="Also print what the kernels of a step take, by name."
)
def main(size: str, contexts: tuple[int, ...], page_size: int, profile: bool) -> None:
    """Print step and cycle times with floors and ratios."""
    table = Table(f"{size}, bfloat16, batch 1, random weights", "kv", "ms", "floor ms", "ratio")
    bandwidth = copy_bandwidth()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        pair = _pair(Path(folder), size, page_size, max(contexts) + _ROOM)
        for context in contexts:
            for name, ms, num_bytes in _rows(pair, context):
                floor = 1e3 * num_bytes / bandwidth
                table.add_row(
                    name,
                    str(context),
                    f"{ms:.2f}",
                    f"{floor:.2f}" if floor else "",
                    _ratio(ms, floor),
                )
        if profile:
            for tokens in (1, 16):
                _print_profile(pair, contexts[0], tokens)
    Console(width=100).print(
        table, f"copy bandwidth {bandwidth / 1e12:.2f} TB/s; {torch.cuda.get_device_name()}"
    )


def _ratio(ms: float, floor: float) -> str:
    return f"{ms / floor:.2f}" if floor else ""


def _rows(pair: _Pair, context: int) -> Iterator[tuple[str, float, float]]:
    """Name, milliseconds and the bytes that must be read."""
    spec, m = pair.spec, pair.manifest
    kv = 2 * 2 * spec.num_layers * spec.attention.num_kv_heads * spec.attention.head_dim * context
    weights = _bytes_read(pair.spec)
    for tokens in (1, 6, 16, 64):
        yield f"target, {tokens} tokens", _target_ms(pair, context, tokens), weights + kv
    draft_kv = 2 * 2 * m.num_layers * m.num_kv_heads * m.head_dim * context
    yield "draft step", _draft_ms(pair, context), _draft_bytes_read(m) + draft_kv
    for steps in (5, 15):
        yield f"cycle, {steps}-step chain", _cycle_ms(pair, context, steps), 0.0


def _bytes_read(spec: TargetCheckpoint) -> float:
    """Decoder and head weights; the token table is read a row at a time."""
    wanted = {
        n: r for n, r in spec.tensors.items() if not n.startswith(("visual.", "embed_tokens."))
    }
    return sum(ref.num_bytes for ref in wanted.values())


def _draft_bytes_read(manifest: DraftManifest) -> float:
    outside = ("fc.", "embed_tokens.", "d2t", "t2d")
    return sum(
        ref.num_bytes for name, ref in manifest.tensors.items() if not name.startswith(outside)
    )


def _pair(folder: Path, size: str, page_size: int, max_seq_len: int) -> _Pair:
    write_target(folder / "target", size)
    write_draft(folder / "draft", size)
    spec = read_target(folder / "target")
    manifest = read_draft(folder / "draft", spec)
    engine = EngineConfig(backend="torch", device="cuda", dtype="bfloat16", page_size=page_size)
    sessions = {}
    for name, model in build_graphs(spec, manifest, engine, reference_location).items():
        if name != "vision":
            (folder / f"{name}.onnx").write_bytes(model.SerializeToString())
            sessions[name] = TorchSession(
                folder / f"{name}.onnx", REFERENCE_ROOT, device=_DEVICE, read_weight=_random
            )
    table_len = -(-max_seq_len // page_size)
    pool = PagePool(table_len + 1, page_size, table_len)
    target_states, draft_states = (
        layer_states(sessions[name].states, pool.num_pages * page_size, _DEVICE)
        for name in ("target", "draft")
    )
    embedding = _RandomTable(spec.tensors["embed_tokens.weight"].shape)
    target = TargetRunner(sessions["target"], target_states, embedding, spec.num_visual_levels)
    d2t = torch.arange(manifest.draft_vocab_size, device=_DEVICE)
    draft = DraftRunner(sessions["fuse"], sessions["draft"], draft_states, embedding, d2t)
    return _Pair(spec, manifest, target, draft, pool)


class _RandomTable(EmbeddingTable):
    """A token table that no file holds; zeros would make every token alike, and every draft
    right.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._table = torch.randn(shape, dtype=torch.bfloat16, device=_DEVICE)
        self._dtype = torch.bfloat16


def _random(expr: WeightExpr, root: Path, device: torch.device) -> Tensor:
    """Weights like a trained model's in size: norms near one, matrices of unit gain."""
    del root
    shape = expr.shape
    drawn = torch.randn(shape, dtype=expr.dtype.torch, device=device)
    return 1 + 0.1 * drawn if len(shape) == 1 else drawn * shape[-1] ** -0.5


def _metadata(pair: _Pair, past: int, tokens: int) -> AttentionMetadata:
    pages = torch.arange(1, pair.pool.num_pages, dtype=torch.int32)[None]
    positions = torch.arange(past, past + tokens, dtype=torch.int32).expand(3, -1)
    return AttentionMetadata.single(past, pages, causal_mask(tokens), positions)


def _target_ms(pair: _Pair, context: int, tokens: int) -> float:
    metadata = _metadata(pair, context, tokens)
    embeds = torch.randn(tokens, pair.spec.hidden_size, dtype=torch.bfloat16, device=_DEVICE)
    return median_ms(
        lambda: pair.target.forward(embeds[None], metadata, torch.arange(tokens)[None])
    )


def _print_profile(pair: _Pair, context: int, tokens: int) -> None:
    """Device time of one captured target step, by kernel."""
    metadata = _metadata(pair, context, tokens)
    embeds = torch.randn(tokens, pair.spec.hidden_size, dtype=torch.bfloat16, device=_DEVICE)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(10):
            pair.target.forward(embeds[None], metadata, torch.arange(tokens)[None])
        torch.cuda.synchronize()
    table = Table(f"kernels, {tokens} tokens, kv {context}", "us a step", "launches")
    for event in sorted(profiler.key_averages(), key=lambda e: -e.device_time_total)[:12]:
        table.add_row(
            event.key[:70], f"{event.device_time_total / 10:.0f}", f"{event.count / 10:.0f}"
        )
    Console(width=110).print(table)


def _draft_ms(pair: _Pair, context: int) -> float:
    metadata, hidden = _metadata(pair, context, 1), pair.manifest.hidden_size
    embeds, features = torch.randn(2, 1, hidden, dtype=torch.bfloat16, device=_DEVICE)
    return median_ms(
        lambda: pair.draft.forward(embeds[None], features[None], metadata, torch.arange(1)[None])
    )


def _cycle_ms(pair: _Pair, context: int, steps: int) -> float:
    """Median host time of a cycle: propose, verify, accept, extend."""
    tree = static_tree(SpeculationConfig(steps=steps))
    drafting = Drafting(Proposer(pair.draft), pair.manifest)
    limits = {"max_seq_len": context + _ROOM, "prefill_chunk": 512}
    decoder = Decoder(pair.target, drafting, **limits, fixed_shapes=True)
    rows = torch.arange(context, dtype=torch.int32).expand(3, -1)
    text = torch.zeros(context, dtype=torch.bool)
    ids = torch.randint(1000, 30000, (context,))
    prompt = Prompt(ids, rows, 0, text)
    sequence = SequenceState(prompt, pair.pool, pair.spec.vocab_size, drafting=True)
    times: list[float] = []
    last = 0.0
    for _ in zip(decoder.run(sequence, tree), range(_REPEATS + 10), strict=False):
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return 1e3 * median(times[-_REPEATS:])


if __name__ == "__main__":
    run_command(main)
