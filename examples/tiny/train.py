"""Make the tiny pair from nothing: tokenizer, Qwen3-VL target, EAGLE-3 draft, demo images,
figures.

    python examples/tiny/train.py --output examples/tiny

One GPU, minutes. Data, initial weights and their order are functions of --seed; GPU kernels may
still differ in the last bits between machines, so a rerun gives an equivalent pair, not the same
bytes.

# Shapes: B examples, L tokens, H hidden, V vocabulary, D draft vocabulary, A answer columns, K
draft steps
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from batch import TRAIN_MIX, Batch, TrainingBatches
from demo import save_demo
from evaluate import evaluate, load_pair
from export import save_draft, save_target
from model import AUX_LAYERS, Draft, Forward, target_config, target_forward
from prompt import SPECIAL, train_bpe
from recipe import recipe_parser
from tasks import Kind, examples
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Qwen3VLForConditionalGeneration

VOCAB_ROWS = 704  # the tokenizer's 640 and unused rows, as Qwen pads its table
DRAFT_VOCAB = 120
DRAFT_STEPS = 7
STEP_DECAY = 0.9


def batches(
    tokenizer: Tokenizer,
    seed: int,
    size: int,
    count: int,
    workers: int,
    device: torch.device,
    kinds: tuple[Kind, ...] = TRAIN_MIX,
) -> Iterator[Batch]:
    data = TrainingBatches(tokenizer.to_str(), seed, size, count, kinds)
    pin = device.type == "cuda"
    loader = DataLoader(
        data,
        batch_size=None,
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=8 if workers else None,
    )
    for batch in loader:
        yield batch.to(device)


@dataclass(frozen=True)
class Budget:
    """Steps, and seconds after which fewer must do."""

    steps: int
    seconds: float = math.inf
    start: float = field(default_factory=time.time)

    def spent(self, step: int) -> float:
        """Which part of it is behind ``step``."""
        return max(step / self.steps, (time.time() - self.start) / self.seconds)


def optimizer_for(
    module: nn.Module, rate: float, budget: Budget
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW with decay on matrices only; linear warm-up, then cosine to zero."""
    trained = [p for p in module.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim > 1]
    vectors = [p for p in trained if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=matrices[0].is_cuda)
    warm = max(1, min(500, budget.steps // 10))

    def factor(step: int) -> float:
        cosine = 0.5 + 0.5 * math.cos(math.pi * min(1.0, budget.spent(step)))
        return min((step + 1) / warm, cosine)

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def answer_columns(batch: Batch, extra: int = 0) -> tuple[Tensor, Tensor]:
    """Columns P, P+1, ... of each answer and whether each lies inside it; int64 and bool [B, A +
    extra].
    """
    widest = int((batch.length - batch.prompt_len).max()) + extra
    columns = batch.prompt_len[:, None] + torch.arange(widest, device=batch.ids.device)
    return columns.clamp(max=batch.ids.shape[1] - 1), columns < batch.length[:, None]


def pick(x: Tensor, columns: Tensor) -> Tensor:
    """``x`` [B, L, H] at ``columns`` [B, A] -> [B, A, H]."""
    return x.gather(1, columns[..., None].expand(-1, -1, x.shape[-1]))


class Progress:
    """Prints a running mean every ``every`` steps."""

    def __init__(self, name: str, steps: int, every: int) -> None:
        self.name, self.steps, self.every, self.start, self.values = (
            name,
            steps,
            every,
            time.time(),
            [],
        )

    def add(self, step: int, *values: Tensor) -> None:
        self.values.append(torch.stack([v.detach().float() for v in values]))
        if (step + 1) % self.every == 0 or step + 1 == self.steps:
            mean = " ".join(f"{v:.4f}" for v in torch.stack(self.values).mean(0).tolist())
            rate = (step + 1) / (time.time() - self.start)
            print(f"{self.name} {step + 1}/{self.steps} {mean}  {rate:.1f} steps/s", flush=True)
            self.values = []


def train_target(
    tokenizer: Tokenizer, args: argparse.Namespace, device: torch.device
) -> Qwen3VLForConditionalGeneration:
    """A new target, trained."""
    torch.manual_seed(args.seed)
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    model = Qwen3VLForConditionalGeneration(target_config(ids, VOCAB_ROWS)).to(device)
    fit_target(model, tokenizer, args, Budget(args.target_steps))
    return model


def fit_target(
    model: Qwen3VLForConditionalGeneration,
    tokenizer: Tokenizer,
    args: argparse.Namespace,
    budget: Budget,
    penalty: Callable[[nn.Module], Tensor] | None = None,
    forward: Forward = target_forward,
) -> None:
    """Next-token loss on the answers only, and a ``penalty`` on what the model did."""
    device = model.device
    model.train()
    print(f"target: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    steps = budget.steps
    optimizer, schedule = optimizer_for(model, args.rate, budget)
    progress = Progress("target", steps, args.print_every)
    for step, batch in enumerate(
        batches(tokenizer, args.seed, args.batch_size, steps, args.workers, device)
    ):
        if budget.spent(step) >= 1:
            break
        with torch.autocast(device.type, torch.bfloat16):
            hidden = forward(model, batch, ()).hidden
            columns, inside = answer_columns(batch)
            logits = model.lm_head(pick(hidden, columns - 1)[inside])
        tokens = batch.ids.gather(1, columns)[inside]
        loss = F.cross_entropy(logits.float(), tokens)
        if penalty is not None:
            loss = loss + penalty(model)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.add(step, loss, (logits.argmax(-1) == tokens).float().mean())


def draft_vocabulary(tokenizer: Tokenizer, seed: int) -> Tensor:
    """The DRAFT_VOCAB most frequent tokens of 20000 training answers, ascending; int64 [D]."""
    counts: collections.Counter[int] = collections.Counter()
    for example in examples("train", seed + 1, 20000):
        counts.update(tokenizer.encode(f"{example.answer}<|im_end|>").ids)
    common = [token for token, _ in counts.most_common(DRAFT_VOCAB)]
    covered = sum(counts[token] for token in common) / sum(counts.values())
    print(
        f"draft vocabulary: {len(common)} of {len(counts)} answer tokens, {covered:.2%} of "
        "occurrences",
        flush=True,
    )
    return torch.tensor(sorted(common))


def draft_losses(
    draft: Any,
    target: Qwen3VLForConditionalGeneration,
    batch: Batch,
    target_ids: Tensor,
    aux_layers: tuple[int, ...],
    forward: Forward,
) -> tuple[list[Tensor], list[Tensor]]:
    """Soft cross-entropy and agreement of each of DRAFT_STEPS steps, over the answer rows.

    Row t of step k, P the prompt length, t = P-1, P, ...:
    # hidden      k = 0: fc(features of x[t]); k > 0: the same row's pre-norm output at step k-1
    # embedding   x[t+1+k]
    # position    p[t] + k
    # learns      the target's distribution after x[t+1+k]
    """
    with torch.no_grad():
        out = forward(target, batch, aux_layers)
        columns, inside = answer_columns(batch, DRAFT_STEPS)
        logits = target.lm_head(pick(out.hidden, columns)).float()
        learnable = inside & (logits.argmax(-1)[..., None] == target_ids).any(-1)
        learnable &= columns + 1 < batch.length[:, None]
        wanted = logits[..., target_ids].softmax(-1)
        embedded = target.get_input_embeddings()(batch.ids)
        seen = out.embeds if draft.sees else embedded
        shifted = torch.cat([seen[:, 1:], seen[:, -1:]], dim=1)
    position = batch.positions[0]
    hidden, keys = draft.first(out.aux, shifted, batch.positions)
    width = columns.shape[1] - DRAFT_STEPS
    rows = columns[:, :width] - 1
    hidden = pick(hidden, rows)
    losses, agreements = [], []
    for step in range(DRAFT_STEPS):
        if step:
            token = pick(embedded, columns[:, step : step + width])
            hidden = draft.next(hidden, token, position.gather(1, rows) + step, rows, keys)
        weight = learnable[:, step : step + width].float()
        target_p = wanted[:, step : step + width]
        log_q = draft.logits(hidden).float().log_softmax(-1)
        losses.append(-((target_p * log_q).sum(-1) * weight).sum() / weight.sum().clamp(min=1))
        same = (log_q.argmax(-1) == target_p.argmax(-1)).float()
        agreements.append((same * weight).sum() / weight.sum().clamp(min=1))
    return losses, agreements


def train_draft(
    tokenizer: Tokenizer,
    target: Qwen3VLForConditionalGeneration,
    target_ids: Tensor,
    args: argparse.Namespace,
    budget: Budget,
    aux_layers: tuple[int, ...] = AUX_LAYERS,
    intermediate: int = 640,
    forward: Forward = target_forward,
) -> Draft:
    """A new draft, trained."""
    torch.manual_seed(args.seed + 1)
    draft = Draft(len(target_ids), intermediate=intermediate)
    device = next(target.parameters()).device
    stream = batches(tokenizer, args.seed + 1, args.batch_size, budget.steps, args.workers, device)
    fit_draft(draft, stream, target, target_ids, args, budget, aux_layers, forward)
    return draft


def fit_draft(
    draft: nn.Module,
    stream: Iterable[Batch],
    target: nn.Module,
    target_ids: Tensor,
    args: argparse.Namespace,
    budget: Budget,
    aux_layers: tuple[int, ...],
    forward: Forward,
    keep: Callable[[nn.Module], object] = lambda _: None,
) -> None:
    """Training-time test: every step's loss counts, later ones less; the target is frozen at its
    saved weights.

    ``keep`` is called with the draft every ``args.print_every`` steps.
    """
    device = next(target.parameters()).device
    draft.to(device)
    print(f"draft: {sum(p.numel() for p in draft.parameters()):,} parameters", flush=True)
    target_ids, steps = target_ids.to(device), budget.steps
    optimizer, schedule = optimizer_for(draft, args.rate, budget)
    progress = Progress("draft", steps, args.print_every)
    for step, batch in enumerate(stream):
        if budget.spent(step) >= 1:
            break
        with torch.autocast(device.type, torch.bfloat16):
            losses, agreements = draft_losses(draft, target, batch, target_ids, aux_layers, forward)
        loss = torch.stack([STEP_DECAY**k * step_loss for k, step_loss in enumerate(losses)]).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.add(step, loss, *agreements)
        if (step + 1) % args.print_every == 0:
            keep(draft)


def parse_args() -> argparse.Namespace:
    steps = {"target": 8000, "draft": 4000}
    parser = recipe_parser(__doc__, seed=0, batch_size=512, steps=steps, examples=500, chains=100)
    parser.add_argument(
        "--stage",
        choices=("all", "target", "draft"),
        default="all",
        help="draft: for the saved target",
    )
    return parser.parse_args()


def earlier_seconds(args: argparse.Namespace) -> dict[str, float]:
    """How long the target took, when it was trained by an earlier ``--stage target``."""
    path = args.output / "metrics.json"
    if args.stage != "draft" or not path.exists():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))["seconds"]


def write_metrics(
    args: argparse.Namespace, device: torch.device, seconds: dict[str, float]
) -> None:
    """Evaluate what lies on disk, in float32, and write metrics.json."""
    torch.backends.cuda.matmul.allow_tf32 = False
    figures = evaluate(load_pair(args.output, device), args.per_kind, args.chains, show_misses=3)
    options = {key: str(value) if key == "output" else value for key, value in vars(args).items()}
    record = {
        "command": " ".join(["python", "examples/tiny/train.py", *sys.argv[1:]]),
        "options": {key: value for key, value in options.items() if key != "output"},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "heldout": figures,
    }
    (args.output / "metrics.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    tokenizer, seconds = train_bpe(args.seed), earlier_seconds(args)
    start = time.time()
    if args.stage != "draft":
        model = train_target(tokenizer, args, device)
        save_target(args.output / "target", model, tokenizer)
        seconds["target"] = time.time() - start
    if args.stage == "target":
        (args.output / "metrics.json").write_text(
            json.dumps({"seconds": seconds}) + "\n", encoding="utf-8"
        )
        return
    start = time.time()
    saved = Qwen3VLForConditionalGeneration.from_pretrained(
        args.output / "target", dtype=torch.float32
    )
    target = saved.to(device).eval().requires_grad_(requires_grad=False)
    target_ids = draft_vocabulary(tokenizer, args.seed)
    draft = train_draft(tokenizer, target, target_ids, args, Budget(args.draft_steps))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    save_draft(args.output / "draft", draft, target_ids, VOCAB_ROWS, ids)
    seconds["draft"] = time.time() - start
    save_demo(args.output / "images")
    write_metrics(args, device, seconds)


if __name__ == "__main__":
    main()
