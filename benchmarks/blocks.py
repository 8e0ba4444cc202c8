"""Cycle times of block drafts on one GPU: ``python -m benchmarks.blocks``.

A pair of a published geometry in bfloat16 with random weights, through the real scheduler and
sampler (``benchmarks/crowd.py``). Prints medians of plain steps and of cycles by batch size, and
their ratio. At batch 1 it also prints the draft's part of a cycle: accepted rows to its cache, the
block, its tokens. The floor is the bytes that this part must read over the copy bandwidth of the
same run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.crowd import Crowd
from benchmarks.drawn_packed import kv_dtype_option, weights_option
from benchmarks.random_pair import RandomPair, random_pair
from benchmarks.synthetic import size_option
from benchmarks.synthetic_block import BLOCK_DRAFTS
from benchmarks.timing import copy_bandwidth, kernel_table, median_ms
from trt_eagle3.config import KVDtype, SpeculationConfig
from trt_eagle3.decode.forward.device_batch import DeviceBatch
from trt_eagle3.decode.sampling.sampling_params import GREEDY
from trt_eagle3.decode.speculation.accept import AcceptedPaths
from trt_eagle3.decode.speculation.tree import Tree, static_tree
from trt_eagle3.drafts.block.manifest import BlockManifest
from trt_eagle3.io.run_command import run_command

__all__ = ["main"]

_ROOM = 256  # tokens after the context
_DEVICE = torch.device("cuda")


@click.command()
@size_option
@click.option(
    "--draft",
    "drafts",
    multiple=True,
    type=click.Choice([*BLOCK_DRAFTS]),
    default=("dflash8", "dflash16", "dspark7"),
    show_default=True,
)
@click.option("--context", default=1024, show_default=True, help="Tokens of every prompt.")
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8, 32), show_default=True)
@click.option("--cycles", default=40, show_default=True, help="Steps per median.")
@weights_option
@kv_dtype_option
@click.option("--profile", is_flag=True, help="Also print the draft part's time by kernel.")
def main(
    size: str,
    drafts: tuple[str, ...],
    context: int,
    batches: tuple[int, ...],
    cycles: int,
    weights: str,
    kv_dtype: KVDtype,
    profile: bool,
) -> None:
    """Print cycle times by draft and batch size, beside plain steps."""
    console, bandwidth = Console(width=120), copy_bandwidth()
    table = Table(
        f"{size}, {weights}, KV {kv_dtype}, context {context}",
        *(f"B {batch}, ms (to plain)" for batch in batches),
        "draft part at B 1, ms",
        "floor, ms",
        "ratio",
    )
    plain: dict[int, float] = {}
    for name in drafts:
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            pair = random_pair(
                Path(folder),
                size,
                16,
                max_seq_len=context + _ROOM,
                max_batch_size=max(batches),
                weights=weights,
                kv_dtype=kv_dtype,
                draft=name,
            )
            if not plain:
                plain = _cycles(pair, context, batches, 0, cycles)
                table.add_row("plain", *(f"{plain[b]:.2f}" for b in batches))
            manifest = _manifest(pair)
            steps = manifest.drafts_of(manifest.block_size)
            found = _cycles(pair, context, batches, steps, cycles)
            run = _draft_part(pair, context, steps)
            part, floor = median_ms(run), 1e3 * _bytes(pair, context) / bandwidth
            if profile:
                console.print(kernel_table(run, f"draft part, {name}"))
            ratios = (f"{found[b]:.2f} ({found[b] / plain[b]:.2f})" for b in batches)
            table.add_row(name, *ratios, f"{part:.2f}", f"{floor:.2f}", f"{part / floor:.2f}")
        del pair
        torch.cuda.empty_cache()
    console.print(table, f"copy {bandwidth / 1e12:.2f} TB/s; {torch.cuda.get_device_name()}")


def _manifest(pair: RandomPair) -> BlockManifest:
    assert isinstance(pair.manifest, BlockManifest)
    return pair.manifest


def _cycles(
    pair: RandomPair, context: int, batches: tuple[int, ...], steps: int, cycles: int
) -> dict[int, float]:
    """Return the median milliseconds of a step by batch size; ``steps`` 0: without the draft."""
    crowd = Crowd(pair, context, max(batches), steps, GREEDY)
    found: dict[int, float] = {}
    for batch in sorted(batches, reverse=True):
        crowd.shrink(batch)
        found[batch] = crowd.median_ms(cycles)
    crowd.shrink(0)
    return found


def _bytes(pair: RandomPair, context: int) -> float:
    """Return the bytes of weights and context that the draft's part of a cycle reads."""
    m = _manifest(pair)
    rows = m.drafts_of(m.block_size)
    read_by_row = {"markov_head.markov_w2.weight": rows}
    looked_up = ("embed_tokens.", "markov_head.markov_w1.", "candidate_selector.pred")
    names = [n for n in m.tensors if not n.startswith((*looked_up, "candidate_selector.succ"))]
    weights = sum(m.tensors[n].num_bytes * read_by_row.get(n, 1) for n in names)
    return weights + 2 * 2 * m.num_layers * m.num_kv_heads * m.head_dim * context


def _draft_part(pair: RandomPair, context: int, steps: int) -> Callable[[], object]:
    """Return the draft's part of a cycle that accepts half of a block."""
    m, tree = _manifest(pair), static_tree(SpeculationConfig(steps=steps))
    drafter = pair.open_drafter(max_rows=512, max_sequences=1, fixed_shapes=True)
    pages = torch.arange(1, pair.pool.num_pages, dtype=torch.int32, device=_DEVICE)
    pages = pages[: pair.pool.table_len][None]
    lengths, none = (torch.tensor([n], dtype=torch.int32, device=_DEVICE) for n in (context, -1))
    batch = DeviceBatch(lengths, lengths, none + 6, none, {"page_table": pages})
    proposal = drafter.dummy_proposal(tree, batch, torch.bfloat16)
    aux = torch.randn(
        (1, tree.num_nodes, len(m.aux_layers) * m.target_hidden_size),
        dtype=torch.bfloat16,
        device=_DEVICE,
    )
    paths = _paths(tree)
    return partial(drafter.extend, batch, proposal, paths, aux, ahead=True)


def _paths(tree: Tree) -> AcceptedPaths:
    """Return the path of a sequence that accepts half of a chain."""
    nodes = torch.arange(tree.num_nodes, device=_DEVICE)[None]
    count = torch.tensor([tree.num_nodes // 2], device=_DEVICE)
    token: Tensor = torch.tensor([7], device=_DEVICE)
    return AcceptedPaths(count, nodes, nodes, token, count, nodes)


if __name__ == "__main__":
    run_command(main)
