"""Train an EAGLE-3 draft and a DFlash draft for SmolLM2-135M-Instruct, on its own answers.

    python examples/smollm2/train_smollm2.py --target engines/smollm2/target --output OUTPUT

One GPU, ``--minutes`` in all. The target writes prompts and answers them (``sample.py``). Both
drafts then train on its distributions, by the recipe of ``examples/tiny``. The output folder gets
``draft/``, the EAGLE-3 draft in SpecForge's layout, ``dflash/``, the block draft in z-lab's, and
``metrics.json``. Both drafts are saved every ``--print-every`` steps. GPU kernels may differ in the
last bits: a rerun gives an equivalent pair, not the same bytes.

# Shapes: B answers, L tokens, K aux states, H hidden
"""

from __future__ import annotations

import argparse
import collections
import copy
import datetime
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tiny"))

from batch import Batch, collate  # noqa: E402
from block import BlockDraft, BlockShape  # noqa: E402
from export import save_dflash, save_draft  # noqa: E402
from model import Draft, Forward, TargetOut  # noqa: E402
from prompt import Encoded  # noqa: E402
from sample import Answer, answers  # noqa: E402
from train import Budget, Progress, draft_losses, fit_draft  # noqa: E402
from train_block import block_losses, fit_block, stored_states  # noqa: E402

MASK_TOKEN = "<empty_output>"  # of the block draft; prompts and answers do not have it
SHARES = {"answers": 0.32, "draft": 0.36, "dflash": 0.21}
"""Of the minutes; the rest is for loading, the stored states and the last figures."""


def llama_forward(model: Any, batch: Batch, aux_layers: tuple[int, ...]) -> TargetOut:
    """The target's forward over right-padded rows; padding never reaches a real row."""
    out = model.model(batch.ids, output_hidden_states=True, use_cache=False)
    aux = torch.cat([out.hidden_states[layer + 1] for layer in aux_layers], dim=-1)
    return TargetOut(out.last_hidden_state, aux, out.hidden_states[0])


@torch.no_grad()
def state_scales(model: Any, batch: Batch, aux_layers: tuple[int, ...]) -> Tensor:
    """Return 1 / root mean square of each aux state, float32 [K]; the first row, which is far
    larger in this target, does not count.
    """
    aux = llama_forward(model, batch, aux_layers).aux[:, 1:].unflatten(-1, (len(aux_layers), -1))
    real = torch.arange(1, batch.ids.shape[1], device=aux.device) < batch.length[:, None]
    return aux[real].float().pow(2).mean((0, 2)).rsqrt()


def scaled_forward(scales: Tensor) -> Forward:
    """Return the target's forward with scaled aux states, so that a draft learns from all alike."""

    def forward(model: Any, batch: Batch, aux_layers: tuple[int, ...]) -> TargetOut:
        out = llama_forward(model, batch, aux_layers)
        aux = out.aux.unflatten(-1, (len(scales), -1)) * scales[:, None]
        return replace(out, aux=aux.flatten(-2))

    return forward


def unscaled(draft: Any, scales: Tensor) -> Any:
    """Return a copy of a draft for aux states as they are: ``fc`` takes the scales."""
    saved = copy.deepcopy(draft)
    columns = saved.fc.weight.data.unflatten(1, (len(scales), -1))
    columns *= scales[None, :, None]
    return saved


def answer_batches(
    found: Sequence[Answer], size: int, pad: int, device: torch.device
) -> Iterator[Batch]:
    """Yield every answer once, in batches of near lengths, in random order."""
    order = random.sample(range(len(found)), len(found))
    wide = 16 * size
    chunks = [order[i : i + wide] for i in range(0, len(order), wide)]
    for chunk in chunks:
        chunk.sort(key=lambda index: len(found[index].ids))
    ordered = [index for chunk in chunks for index in chunk]
    rows = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    for row in random.sample(rows, len(rows)):
        encoded = []
        for answer in (found[index] for index in row):
            positions = np.tile(np.arange(len(answer.ids)), (3, 1))
            encoded.append(Encoded(np.array(answer.ids), positions, answer.prompt_len, ()))
        yield collate(encoded, (), pad).to(device)


class Recipe:
    """Trains one pair of drafts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.start = args, time.monotonic()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = AutoTokenizer.from_pretrained(args.target)
        model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
        self.target = model.to(self.device).eval().requires_grad_(requires_grad=False)
        self.layers = model.config.num_hidden_layers
        self.figures: dict[str, Any] = {}

    def seconds(self, part: str) -> float:
        """Return how long a part may take."""
        return SHARES[part] * 60 * self.args.minutes

    def done(self, part: str, since: float) -> None:
        """Note a part's seconds."""
        self.figures[f"{part}_seconds"] = round(time.monotonic() - since, 1)
        print(f"{part}: {self.figures[f'{part}_seconds']} s", flush=True)

    def stream(self, found: Sequence[Answer]) -> Iterator[Batch]:
        """Yield batches of ``found`` without end."""
        while True:
            yield from answer_batches(
                found, self.args.batch_size, self.tokenizer.pad_token_id, self.device
            )

    def answers(self) -> list[Answer]:
        """Return the target's answers to its own prompts."""
        since = time.monotonic()
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        model = copy.deepcopy(self.target).to(dtype)
        deadline = since + self.seconds("answers")
        sampled = answers(model, self.tokenizer, self.args.seed, self.args.answer_batch, deadline)
        found = [answer for batch in sampled for answer in batch]
        tokens = sum(len(answer.ids) - answer.prompt_len for answer in found)
        self.figures |= {"answers": len(found), "answer_tokens": tokens}
        for answer in found[:: max(1, len(found) // 5)]:
            print(repr(self.tokenizer.decode(answer.ids[-200:])), flush=True)
        self.done("answers", since)
        return found

    def vocabulary(self, found: Sequence[Answer]) -> Tensor:
        """Return the most frequent tokens of the answers, ascending; int64 [draft vocabulary]."""
        counts: collections.Counter[int] = collections.Counter()
        for answer in found:
            counts.update(answer.ids[answer.prompt_len :])
        common = [token for token, _ in counts.most_common(self.args.vocab)]
        covered = sum(counts[token] for token in common) / sum(counts.values())
        self.figures |= {"draft_vocabulary": len(common), "covered": round(covered, 4)}
        print(f"draft vocabulary: {len(common)} of {len(counts)} tokens, {covered:.2%}", flush=True)
        return torch.tensor(sorted(common), device=self.device)

    def budget(self, part: str) -> Budget:
        """Return the steps and seconds of a draft."""
        return Budget(self.args.steps, self.seconds(part))

    def draft(self, found: Sequence[Answer], ids: Tensor) -> Callable[[Batch], list[Tensor]]:
        """Train and save the EAGLE-3 draft; returns a function that measures it on a batch."""
        since, args = time.monotonic(), self.args
        aux_layers = (1, self.layers // 2 - 1, self.layers - 4)
        torch.manual_seed(args.seed + 1)
        draft = Draft(len(ids), self.target.config.hidden_size, args.inner, args.heads, 1)
        draft.lm_head.weight.data.copy_(self.target.lm_head.weight[ids])
        draft.norm.weight.data.copy_(self.target.model.norm.weight)
        special = {
            token: self.tokenizer.convert_tokens_to_ids(token)
            for token in ("<|endoftext|>", "<|im_end|>")
        }
        place = (ids, self.target.config.vocab_size, special, aux_layers, "llama")

        scales = state_scales(self.target, next(self.stream(found)), aux_layers)
        forward = scaled_forward(scales)

        def keep(some: Any) -> None:
            save_draft(args.output / "draft", unscaled(some, scales), *place)

        options = argparse.Namespace(rate=args.rate, print_every=args.print_every)
        fit_draft(
            draft,
            self.stream(found),
            self.target,
            ids,
            options,
            self.budget("draft"),
            aux_layers,
            forward,
            keep,
        )
        keep(draft)
        self.done("draft", since)

        def measure(batch: Batch) -> list[Tensor]:
            _, agreed = draft_losses(draft, self.target, batch, ids, aux_layers, forward)
            return agreed

        return measure

    def block(self, found: Sequence[Answer]) -> Callable[[Batch], list[Tensor]]:
        """Train and save the DFlash draft; returns a function that measures it on a batch."""
        since, args, config = time.monotonic(), self.args, self.target.config
        shape = BlockShape(
            aux_layers=(self.layers // 2 - 1, self.layers - 4),
            block_size=8,
            own_position=True,
            windows=(0,),
            mask_id=self.tokenizer.convert_tokens_to_ids(MASK_TOKEN),
            hidden=config.hidden_size,
            intermediate=args.block_inner,
            heads=args.heads,
            kv_heads=1,
            vocab_size=config.vocab_size,
        )
        torch.manual_seed(args.seed + 2)
        draft = BlockDraft(shape).to(self.device)
        draft.norm.weight.data.copy_(self.target.model.norm.weight)
        scales = state_scales(self.target, next(self.stream(found)), shape.aux_layers)
        forward = scaled_forward(scales)
        once = answer_batches(found, args.batch_size, self.tokenizer.pad_token_id, self.device)
        progress = Progress("states", len(found) // args.batch_size, args.print_every)
        stored = stored_states(self.target, once, progress, shape.aux_layers, forward)

        def keep(some: BlockDraft) -> None:
            save_dflash(args.output / "dflash", unscaled(some, scales), self.target)

        options = argparse.Namespace(
            rate=args.rate,
            print_every=args.print_every,
            draft_steps=args.steps,
            draft_seconds=self.seconds("dflash"),
            anchors=args.anchors,
            seed=args.seed,
        )
        fit_block(draft, self.target, stored, options, keep)
        keep(draft)
        self.done("dflash", since)

        def measure(batch: Batch) -> list[Tensor]:
            states = stored_states(
                self.target, [batch], Progress("held out", 2, 2), shape.aux_layers, forward
            )
            _, agreed = block_losses(draft, self.target, states[0], args.anchors)
            return agreed

        return measure

    @torch.no_grad()
    def held_out(self, found: Sequence[Answer], measure: Any) -> list[float]:
        """Return the agreement of each drafted token with the target, over answers that no draft
        was trained on.
        """
        pad = self.tokenizer.pad_token_id
        batches = list(answer_batches(found, self.args.batch_size, pad, self.device))
        with torch.autocast(self.device.type, torch.bfloat16):
            agreed = torch.stack([torch.stack(measure(batch)).float() for batch in batches])
        return [round(value, 4) for value in agreed.mean(0).tolist()]


def write_metrics(recipe: Recipe, figures: dict[str, Any]) -> None:
    """Write ``metrics.json``."""
    args, cuda = recipe.args, recipe.device.type == "cuda"
    options = {
        key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()
    }
    record = {
        "command": " ".join(["python", "examples/smollm2/train_smollm2.py", *sys.argv[1:]]),
        "options": {
            key: value for key, value in options.items() if key not in ("target", "output")
        },
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "seconds": round(time.monotonic() - recipe.start, 1),
        **figures,
    }
    text = json.dumps(record, indent=2) + "\n"
    (args.output / "metrics.json").write_text(text, encoding="utf-8")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--target", type=Path, required=True, help="the converted checkpoint")
    parser.add_argument("--output", type=Path, required=True, help="gets the drafts")
    parser.add_argument("--minutes", type=float, default=6, help="at most, in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answer-batch", type=int, default=1024, help="prompts sampled at once")
    parser.add_argument("--batch-size", type=int, default=64, help="answers of a training step")
    parser.add_argument("--steps", type=int, default=3000, help="of each draft, at most")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--vocab", type=int, default=1536, help="tokens of the EAGLE-3 draft")
    parser.add_argument("--inner", type=int, default=320, help="width of the EAGLE-3 draft's MLP")
    parser.add_argument("--block-inner", type=int, default=192, help="width of DFlash's MLP")
    parser.add_argument("--heads", type=int, default=3, help="attention heads of each draft")
    parser.add_argument("--anchors", type=int, default=12, help="blocks per answer and step")
    parser.add_argument("--print-every", type=int, default=100)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    args.output.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(args)
    found = recipe.answers()
    if len(found) < 2 * args.batch_size:
        raise SystemExit(
            f"{len(found)} answers were sampled, expected {2 * args.batch_size} or more. Give more "
            "--minutes."
        )
    kept = max(1, min(4 * args.batch_size, len(found) // 20))
    held_out, found = found[:kept], found[kept:]
    figures = recipe.figures
    measured = {
        "draft": recipe.draft(found, recipe.vocabulary(found)),
        "dflash": recipe.block(found),
    }
    for name, measure in measured.items():
        figures[f"{name}_agreement"] = recipe.held_out(held_out, measure)
        print(name, figures[f"{name}_agreement"], flush=True)
    write_metrics(recipe, figures)


if __name__ == "__main__":
    main()
