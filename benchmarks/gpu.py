"""Step times of a big pair on one GPU: ``python -m benchmarks.gpu``.

Graphs of a published geometry in bfloat16 with random weights (no checkpoint is needed), through
the torch session with our kernels. Prints medians of CUDA-event timings of captured steps. The
floor is the bytes of weights, KV and recurrent states over the copy bandwidth measured in the same
run. Whole cycles of the real loop are timed on the host's clock.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.drawn_packed import kv_dtype_option, packed_share, weights_option
from benchmarks.random_pair import RandomPair, random_pair
from benchmarks.synthetic import size_option
from benchmarks.timing import copy_bandwidth, kernel_table, median_ms
from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.config import KVDtype, SpeculationConfig
from trt_eagle3.decode.forward.runner import AttentionMetadata, causal_mask
from trt_eagle3.decode.speculation.eagle import EagleDrafter
from trt_eagle3.decode.speculation.tree import static_tree
from trt_eagle3.engine.runtime.memory import kv_bytes_per_token, state_bytes
from trt_eagle3.io.run_command import run_command
from trt_eagle3.spec import SparseMoe

__all__ = ["cycle_ms", "main", "target_bytes_read", "target_ms"]

_DEVICE = "cuda"
_REPEATS = 30
_ROOM = 1024  # tokens after the context


@click.command()
@size_option
@click.option(
    "--context", "contexts", multiple=True, type=int, default=(1024, 16384), show_default=True
)
@click.option("--page-size", default=16, show_default=True)
@weights_option
@kv_dtype_option
@click.option(
    "--profile", is_flag=True, help="Also print the time of each kernel of a step, by name."
)
def main(
    size: str,
    contexts: tuple[int, ...],
    page_size: int,
    weights: str,
    kv_dtype: KVDtype,
    profile: bool,
) -> None:
    """Print step and cycle times with floors and ratios."""
    title = f"{size}, {weights}, KV {kv_dtype}, batch 1, random weights"
    table = Table(title, "kv", "ms", "floor ms", "ratio")
    bandwidth = copy_bandwidth()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        room = max(contexts) + _ROOM
        pair = random_pair(
            Path(folder), size, page_size, max_seq_len=room, weights=weights, kv_dtype=kv_dtype
        )
        for context in contexts:
            for name, ms, num_bytes in _rows(pair, context, weights, kv_dtype):
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


def _rows(
    pair: RandomPair, context: int, kind: str, kv_dtype: KVDtype
) -> Iterator[tuple[str, float, float]]:
    """Yield name, milliseconds and the bytes that must be read."""
    spec, m = pair.spec, pair.manifest
    kept = kv_bytes_per_token(spec, None, "bfloat16", kv_dtype) * context
    kept += 2 * state_bytes(spec, "bfloat16")  # read, and written
    for tokens in (1, 6, 16, 32, 64):
        weights = target_bytes_read(pair.spec, kind, tokens)
        yield f"target, {tokens} tokens", target_ms(pair, context, tokens), weights + kept
    draft_kv = 2 * 2 * m.num_layers * m.num_kv_heads * m.head_dim * context
    yield "draft step", _draft_ms(pair, context), _draft_bytes_read(m) + draft_kv
    for steps in (3, 5, 15):
        yield f"cycle, {steps}-step chain", cycle_ms(pair, context, steps), 0.0


def target_bytes_read(spec: TargetCheckpoint, kind: str, tokens: int) -> float:
    """Return the bytes of decoder and head weights that a step reads.

    The token table is excluded: few of its rows are read. Of a mixture, the experts of ``tokens``
    count, if all experts are equally probable.
    """
    outside = ("visual.", "embed_tokens.")
    inside = {n: r for n, r in spec.tensors.items() if not n.startswith(outside)}
    mixture = next((layer.mlp for layer in spec.layers if isinstance(layer.mlp, SparseMoe)), None)
    touched = 1.0
    if mixture is not None:
        touched -= (1 - mixture.top_k / mixture.num_experts) ** tokens
    return sum(
        ref.num_bytes * packed_share(name, kind) * (touched if ".mlp.experts." in name else 1.0)
        for name, ref in inside.items()
    )


def _draft_bytes_read(manifest: DraftManifest) -> float:
    outside = ("fc.", "embed_tokens.", "d2t", "t2d")
    return sum(
        ref.num_bytes for name, ref in manifest.tensors.items() if not name.startswith(outside)
    )


def _metadata(pair: RandomPair, past: int, tokens: int) -> AttentionMetadata:
    pages = torch.arange(1, pair.pool.num_pages, dtype=torch.int32)[None]
    positions = torch.arange(past, past + tokens, dtype=torch.int32).expand(3, -1)
    return AttentionMetadata.single(past, pages, causal_mask(tokens), positions)


def _target_metadata(pair: RandomPair, past: int, tokens: int) -> AttentionMetadata:
    """With states that every token changes: those that padding reads and writes."""
    metadata = _metadata(pair, past, tokens)
    inputs = pair.target.states.padding(1, metadata.state_inputs["page_table"])
    return replace(metadata, state_inputs=inputs)


def target_ms(pair: RandomPair, context: int, tokens: int) -> float:
    """Return the median device time of a captured target step."""
    metadata = _target_metadata(pair, context, tokens)
    embeds = torch.randn(tokens, pair.spec.hidden_size, dtype=torch.bfloat16, device=_DEVICE)
    return median_ms(
        lambda: pair.target.forward(embeds[None], metadata, torch.arange(tokens)[None])
    )


def _print_profile(pair: RandomPair, context: int, tokens: int) -> None:
    """Print the device time of one captured target step, by kernel."""
    metadata = _target_metadata(pair, context, tokens)
    embeds = torch.randn(tokens, pair.spec.hidden_size, dtype=torch.bfloat16, device=_DEVICE)
    rows = torch.arange(tokens)[None]
    forward = partial(pair.target.forward, embeds[None], metadata, rows)
    Console(width=110).print(kernel_table(forward, f"kernels, {tokens} tokens, kv {context}"))


def _draft_ms(pair: RandomPair, context: int) -> float:
    metadata, hidden = _metadata(pair, context, 1), pair.manifest.hidden_size
    embeds, features = torch.randn(2, 1, hidden, dtype=torch.bfloat16, device=_DEVICE)
    drafter = pair.open_drafter(max_rows=512, max_sequences=1, fixed_shapes=True)
    assert isinstance(drafter, EagleDrafter)
    forward, row = drafter.runner.forward, torch.arange(1)[None]
    return median_ms(lambda: forward(embeds[None], features[None], metadata, row))


def cycle_ms(pair: RandomPair, context: int, steps: int | None) -> float:
    """Return the median host time of a cycle: propose, verify, accept, extend.

    ``steps``: of the chain; None: without a draft.
    """
    tree = None if steps is None else static_tree(SpeculationConfig(steps=steps))
    decoder = pair.decoder(prefill_chunk=512, drafting=steps is not None)
    sequence = pair.sequence(context, drafting=steps is not None)
    times: list[float] = []
    last = 0.0
    for _ in zip(decoder.run(sequence, tree), range(_REPEATS + 10), strict=False):
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return 1e3 * median(times[-_REPEATS:])


if __name__ == "__main__":
    run_command(main)
