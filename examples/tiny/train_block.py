"""Train the block drafts of the tiny pair: DFlash in z-lab's layout, DSpark in DeepSpec's.

    python examples/tiny/train_block.py --output examples/tiny

One CPU thread, half an hour (``dflash_metrics.json``, ``dspark_metrics.json``). The target runs
once over ``--batches`` training batches, and over ``--text-batches`` of text questions, whose
operands need more examples. Each draft then trains on its stored states, with new anchors each time
a batch comes up.

# Shapes: B examples, L tokens, A anchors per example, D drafts per block, V vocabulary, H hidden
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from batch import Batch
from block import BlockDraft, BlockShape
from evaluate import block_pair, evaluate
from export import rounded, save_dflash, save_dspark
from model import Forward, target_forward
from prompt import train_bpe
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from train import STEP_DECAY, Budget, Progress, batches, optimizer_for
from transformers import AutoModelForImageTextToText

__all__ = [
    "States",
    "begun",
    "block_parser",
    "fit_block",
    "measured",
    "read_target",
    "stored_states",
    "task_states",
]

MASK_ID = 640  # the first unused row, as Qwen3's drafts take one
AUX_LAYERS = (1, 3, 6)
SHAPES = {
    "dflash": BlockShape(AUX_LAYERS, 8, own_position=True, windows=(0,) * 3, mask_id=MASK_ID),
    "dspark": BlockShape(
        AUX_LAYERS, 7, own_position=False, windows=(0,) * 3, mask_id=MASK_ID, markov_rank=32
    ),
}


@dataclass(frozen=True)
class States:
    """What a block draft learns from, of one batch: the target's aux and final hidden states."""

    ids: Tensor
    prompt_len: Tensor
    length: Tensor
    aux: Tensor
    hidden: Tensor


def task_states(
    target: Any,
    tokenizer: Tokenizer,
    args: argparse.Namespace,
    aux_layers: tuple[int, ...],
    forward: Forward = target_forward,
) -> list[States]:
    """Store the states of ``args.batches`` training batches and of more text questions."""
    device, size, workers = next(target.parameters()).device, args.batch_size, args.workers
    mixed = batches(tokenizer, args.seed + 1, size, args.batches, workers, device)
    text = batches(tokenizer, args.seed + 2, size, args.text_batches, workers, device, ("text",))
    progress = Progress("states", args.batches + args.text_batches, args.print_every)
    return stored_states(target, itertools.chain(mixed, text), progress, aux_layers, forward)


@torch.no_grad()
def stored_states(
    target: Any,
    stream: Iterable[Batch],
    progress: Progress,
    aux_layers: tuple[int, ...],
    forward: Forward = target_forward,
) -> list[States]:
    """Run the target over training batches; its states are stored in bfloat16."""
    found = []
    for step, batch in enumerate(stream):
        with torch.autocast(batch.ids.device.type, torch.bfloat16):
            out = forward(target, batch, aux_layers)
        states = (out.aux.bfloat16(), out.hidden.bfloat16())
        found.append(States(batch.ids, batch.prompt_len, batch.length, *states))
        progress.add(step, batch.length.float().mean())
    return found


@torch.no_grad()
def begun(shape: BlockShape, target: Any, saved: Path | None) -> BlockDraft:
    """Return a draft that begins with a saved draft, or with the last layers of a dense target.

    A saved draft may be of another kind, without some of the tensors. Otherwise the sizes are the
    target's, and the context begins as its last aux state.
    """
    draft = BlockDraft(shape)
    if saved is not None:
        names, tensors = draft.state_dict(), load_file(saved / "model.safetensors")
        draft.load_state_dict({n: t for n, t in tensors.items() if n in names}, strict=False)
        return draft
    decoder = target.model.language_model
    layers = decoder.layers[-len(draft.layers) :]
    for own, theirs in zip(draft.layers, layers, strict=True):
        own.load_state_dict(theirs.state_dict())
    draft.norm.load_state_dict(decoder.norm.state_dict())
    draft.hidden_norm.load_state_dict(layers[0].input_layernorm.state_dict())
    draft.fc.weight[:, -shape.hidden :] += torch.eye(shape.hidden)
    return draft


def block_losses(
    draft: BlockDraft, target: Any, states: States, num_anchors: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Loss and agreement of each draft of ``num_anchors`` random blocks per example.

    Draft k of the block whose anchor is column a:
    # token before      x[a+k], of the answer itself
    # learns            the target's distribution after x[a+k]
    """
    shape, embed = draft.shape, target.get_input_embeddings()
    room = states.length - states.prompt_len - 1  # anchors that have a token after them
    drawn = torch.rand(len(room), num_anchors, device=room.device)
    anchors = states.prompt_len[:, None] + (drawn * room[:, None]).long()
    columns = anchors[..., None] + torch.arange(shape.num_drafts, device=room.device)
    learnable = columns + 1 < states.length[:, None, None]
    columns = columns.clamp(max=states.ids.shape[1] - 1)
    flat = columns.flatten(1)
    previous = states.ids.gather(1, flat).view_as(columns)
    with torch.no_grad():
        rows = flat[..., None].expand(-1, -1, states.hidden.shape[-1])
        wanted = target.lm_head(states.hidden.gather(1, rows)).float().softmax(-1)
        wanted = wanted.unflatten(1, columns.shape[1:])
        masks = torch.full_like(anchors, shape.mask_id)[..., None]
        tokens = [states.ids.gather(1, anchors)[..., None], *[masks] * (shape.block_size - 1)]
        embedded = embed(torch.cat(tokens, dim=-1))
    hidden = draft(states.aux, anchors, embedded)
    logits = target.lm_head(hidden).float()
    loss = torch.zeros_like(logits[..., 0])
    if shape.markov_rank:
        logits = logits + draft.markov(previous).float()
        overlap = torch.minimum(logits.detach().softmax(-1), wanted).sum(-1)
        sure = draft.confidence(hidden, previous).float()
        loss = loss + F.binary_cross_entropy_with_logits(sure, overlap, reduction="none")
    loss = loss - (wanted * logits.log_softmax(-1)).sum(-1)
    if shape.selector_rank:
        logits = logits + draft.transitions(hidden, previous).float()
        loss = loss - (wanted * logits.log_softmax(-1)).sum(-1)
    same = (logits.argmax(-1) == wanted.argmax(-1)).float()
    weight = learnable.float()
    total = weight.sum((0, 1)).clamp(min=1)
    return list((loss * weight).sum((0, 1)) / total), list((same * weight).sum((0, 1)) / total)


def fit_block(
    draft: BlockDraft,
    target: Any,
    stored: Sequence[States],
    args: argparse.Namespace,
    keep: Callable[[BlockDraft], object] = lambda _: None,
) -> None:
    """Train ``draft`` on stored states; the target is frozen at its saved weights.

    ``keep`` is called with the draft every ``args.print_every`` steps.
    """
    print(f"draft: {sum(p.numel() for p in draft.parameters()):,} parameters", flush=True)
    steps, device = args.draft_steps, stored[0].ids.device
    budget = Budget(steps, args.draft_seconds)
    optimizer, schedule = optimizer_for(draft, args.rate, budget)
    progress = Progress("draft", steps, args.print_every)
    order: list[int] = []
    rng = random.Random(args.seed)
    for step in range(steps):
        if budget.spent(step) >= 1:
            break
        if not order:
            order = rng.sample(range(len(stored)), len(stored))
        with torch.autocast(device.type, torch.bfloat16):
            losses, agreements = block_losses(draft, target, stored[order.pop()], args.anchors)
        loss = torch.stack([STEP_DECAY**k * each for k, each in enumerate(losses)]).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.add(step, loss, *agreements)
        if (step + 1) % args.print_every == 0:
            keep(draft)


def read_target(folder: Path) -> Any:
    """Read a tiny target as saved, in float32, frozen."""
    target = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return target.eval().requires_grad_(requires_grad=False)


def measured(
    draft: BlockDraft,
    target: Any,
    tokenizer: Tokenizer,
    args: argparse.Namespace,
    run: Forward = target_forward,
) -> dict[str, dict[str, float]]:
    """Evaluate a draft on held-out examples."""
    pair = block_pair(tokenizer, target, draft, run)
    return evaluate(pair, args.per_kind, args.chains)


def block_parser(doc: str | None, seed: int) -> argparse.ArgumentParser:
    """Make the parser of a recipe of block drafts."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="holds target/, gets the drafts")
    parser.add_argument("--seed", type=int, default=seed)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--batches", type=int, default=160, help="that the target runs over")
    parser.add_argument("--text-batches", type=int, default=240, help="more, of text alone")
    parser.add_argument("--anchors", type=int, default=6, help="blocks per example and step")
    parser.add_argument("--draft-steps", type=int, default=1000)
    parser.add_argument("--draft-seconds", type=float, default=math.inf, help="at most, per draft")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--workers", type=int, default=0, help="data processes")
    parser.add_argument("--begin", type=Path, help="a saved block draft to begin with")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--print-every", type=int, default=50)
    parser.add_argument("--per-kind", type=int, default=25, help="held-out examples per kind")
    parser.add_argument("--chains", type=int, default=25, help="of which are decoded speculatively")
    return parser


def write_figures(
    args: argparse.Namespace, name: str, seconds: float, figures: dict[str, dict[str, float]]
) -> None:
    """Write ``<name>_metrics.json`` beside the draft's folder."""
    record = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": f"cpu, {args.threads} thread(s)",
        "torch": torch.__version__,
        "seconds": round(seconds, 1),
        "heldout": figures,
    }
    path = args.output / f"{name}_metrics.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = block_parser(__doc__, seed=4)
    parser.add_argument("--drafts", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer, target = train_bpe(0), read_target(args.output / "target")
    stored = task_states(target, tokenizer, args, AUX_LAYERS)
    for name in args.drafts:
        start = time.time()
        torch.manual_seed(args.seed)
        draft = begun(SHAPES[name], target, args.begin)
        fit_block(draft, target, stored, args)
        seconds = time.time() - start
        rounded(draft)
        save = {"dflash": save_dflash, "dspark": save_dspark}[name]
        save(args.output / name, draft, target)
        write_figures(args, name, seconds, measured(draft, target, tokenizer, args))


if __name__ == "__main__":
    main()
