"""Reference evaluation of the tiny pair on held-out data: exact answers, and acceptance of a greedy
draft chain.

    python examples/tiny/evaluate.py [--draft dflash] [--per-kind 100] [--chains 25]

Plain PyTorch without caches: every forward recomputes the whole sequence, so the loop below is
short enough to be checked by reading. Weights are the saved bfloat16 values, arithmetic is float32.

# Shapes: B examples, L tokens, H hidden
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from batch import Batch, collate
from block import BlockDraft, load_block
from model import AUX_LAYERS, Draft, Forward, TargetOut, target_forward
from prompt import Encoded, encode, prompt_text
from safetensors.torch import load_file
from tasks import KINDS, Example, Kind, examples
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

__all__ = ["Pair", "block_pair", "chain", "evaluate", "load_pair"]

Propose = Callable[[Any, Batch, TargetOut, int], list[int]]
"""Drafts tokens of a pair after so many known ids."""

HERE = Path(__file__).parent
MAX_NEW, NUM_STEPS, HELDOUT_SEED = 64, 5, 1


@dataclass
class Pair:
    """A loaded pair; ``target_ids`` maps draft vocabulary ids to the target's, int64 [draft
    vocab].
    """

    tokenizer: Tokenizer
    target: PreTrainedModel
    draft: Any
    target_ids: Tensor
    device: torch.device
    aux_layers: tuple[int, ...] = AUX_LAYERS
    run: Forward = target_forward
    drafts: Propose | None = None
    num_drafts: int = NUM_STEPS

    @property
    def vision_ids(self) -> tuple[int, int]:
        return self.target.config.image_token_id, self.target.config.video_token_id

    @property
    def end_id(self) -> int:
        return self.tokenizer.token_to_id("<|im_end|>")

    def prompt_batch(self, encoded: list[Encoded]) -> Batch:
        """Prompts only, with free columns for MAX_NEW tokens and the drafts after them."""
        cut = [
            replace(e, ids=e.ids[: e.prompt_len], positions=e.positions[:, : e.prompt_len])
            for e in encoded
        ]
        return collate(cut, self.vision_ids, self.end_id, MAX_NEW + self.num_drafts + 1).to(
            self.device
        )

    def forward(self, batch: Batch) -> TargetOut:
        """The target's."""
        return self.run(self.target, batch, self.aux_layers)

    def argmax(self, hidden: Tensor) -> Tensor:
        """Target token ids for final hidden states [..., H]."""
        return self.target.lm_head(hidden).argmax(-1)


def load_pair(folder: Path, device: torch.device, name: str = "draft") -> Pair:
    """Read ``folder``/target and the draft ``folder``/``name`` as saved, in float32."""
    tokenizer = Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
    target = AutoModelForImageTextToText.from_pretrained(folder / "target", dtype=torch.float32)
    target = target.to(device).eval()
    config = json.loads((folder / name / "config.json").read_text(encoding="utf-8"))
    if "eagle_config" not in config:
        return block_pair(tokenizer, target, load_block(folder / name).to(device).eval())
    tensors = load_file(folder / name / "model.safetensors")
    d2t = tensors.pop("d2t")
    del tensors["t2d"]
    inner = len(tensors["midlayer.mlp.gate_proj.weight"])
    draft = Draft(len(d2t), intermediate=inner).float()
    draft.load_state_dict({name: t.float() for name, t in tensors.items()})
    target_ids = (d2t + torch.arange(len(d2t))).to(device)
    aux_layers = tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    return Pair(tokenizer, target, draft.to(device).eval(), target_ids, device, aux_layers)


def block_pair(
    tokenizer: Tokenizer, target: Any, draft: BlockDraft, run: Forward = target_forward
) -> Pair:
    """Return a target with a block draft, both on one device."""
    shape, table = draft.shape, target.lm_head.weight
    ids = torch.arange(shape.vocab_size, device=table.device)
    return Pair(
        *(tokenizer, target, draft, ids, table.device, shape.aux_layers, run),
        drafts=propose_block,
        num_drafts=shape.num_drafts,
    )


@torch.inference_mode()
def greedy(pair: Pair, encoded: list[Encoded]) -> list[list[int]]:
    """The target's own greedy answers, <|im_end|> included."""
    batch = pair.prompt_batch(encoded)
    length, rows = batch.length.clone(), torch.arange(len(encoded), device=pair.device)
    done = torch.zeros_like(length, dtype=torch.bool)
    for _ in range(MAX_NEW):
        hidden = pair.forward(batch.trimmed(int(length.max()))).hidden
        token = pair.argmax(hidden[rows, length - 1])
        batch.ids[rows, length] = torch.where(done, batch.ids[rows, length], token)
        length = length + (~done).long()
        done |= token == pair.end_id
        if bool(done.all()):
            break
    starts, stops = batch.prompt_len.tolist(), length.tolist()
    return [batch.ids[i, starts[i] : stops[i]].tolist() for i in range(len(encoded))]


@torch.inference_mode()
def propose(pair: Pair, batch: Batch, out: TargetOut, known: int) -> list[int]:
    """Chain of NUM_STEPS draft tokens after ``known`` ids, of which the last has no target features
    yet.

    # row        0    1   ...  known-2         -> the next proposals
    # features   h0   h1  ...  h[known-2]
    # embedding  x1   x2  ...  x[known-1]
    """
    embed = pair.target.model.language_model.embed_tokens
    positions = batch.positions[:, :, : known - 1]
    embedded = embed(batch.ids[:, 1:known])
    if pair.draft.sees:  # the last token has none of the target's yet
        embedded = torch.cat([out.embeds[:, 1 : known - 1], embedded[:, -1:]], dim=1)
    hidden, keys = pair.draft.first(out.aux[:, : known - 1], embedded, positions)
    hidden, row = hidden[:, -1:], torch.tensor([[known - 2]], device=pair.device)
    proposed: list[int] = []
    for step in range(1, NUM_STEPS + 1):
        token = pair.target_ids[pair.draft.logits(hidden).argmax(-1)]
        proposed.append(int(token))
        if step < NUM_STEPS:
            hidden = pair.draft.next(hidden, embed(token), positions[0, :, -1:] + step, row, keys)
    return proposed


def propose_block(pair: Pair, batch: Batch, out: TargetOut, known: int) -> list[int]:
    """Draft a block after ``known`` ids; the last, the anchor, has no target states yet."""
    embed, head = pair.target.model.language_model.embed_tokens, pair.target.lm_head
    return pair.draft.propose(out.aux[:, : known - 1], batch.ids[:, known - 1 : known], embed, head)


@torch.inference_mode()
def chain(pair: Pair, encoded: Encoded) -> tuple[list[int], list[int]]:
    """Speculative greedy decoding of one example: its answer ids, and the tokens gained in each
    round.
    """
    batch = pair.prompt_batch([encoded])
    known = encoded.prompt_len
    out = pair.forward(batch.trimmed(known))
    batch.ids[0, known] = pair.argmax(out.hidden[0, -1])
    known, gained = known + 1, []
    while int(batch.ids[0, known - 1]) != pair.end_id and known - encoded.prompt_len < MAX_NEW:
        proposed = (pair.drafts or propose)(pair, batch, out, known)
        batch.ids[0, known : known + len(proposed)] = torch.tensor(proposed, device=pair.device)
        out = pair.forward(batch.trimmed(known + len(proposed)))
        verified = pair.argmax(out.hidden[0, known - 1 :]).tolist()
        matched = 0
        while matched < len(proposed) and proposed[matched] == verified[matched]:
            matched += 1
        fresh = verified[: matched + 1]
        if pair.end_id in fresh:
            fresh = fresh[: fresh.index(pair.end_id) + 1]
        batch.ids[0, known : known + len(fresh)] = torch.tensor(fresh, device=pair.device)
        known += len(fresh)
        gained.append(len(fresh))
    return batch.ids[0, encoded.prompt_len : known].tolist(), gained


def _heldout(
    pair: Pair, kind: Kind, count: int, *, wrapped: bool
) -> tuple[list[Example], list[Encoded]]:
    found = list(examples("heldout", HELDOUT_SEED, count, (kind,)))
    return found, [encode(pair.tokenizer, e, prompt_text(e, wrapped=wrapped)) for e in found]


def evaluate(
    pair: Pair, per_kind: int, chains: int, show_misses: int = 0
) -> dict[str, dict[str, float]]:
    """Figures per kind; ``frames_4_57`` is frames with the prompt text of transformers 4.57's
    processor.
    """
    result: dict[str, dict[str, float]] = {}
    for name, kind, wrapped in [*((k, k, True) for k in KINDS), ("frames_4_57", "frames", False)]:
        found, encoded = _heldout(pair, kind, per_kind, wrapped=wrapped)
        answers = [a for i in range(0, per_kind, 100) for a in greedy(pair, encoded[i : i + 100])]
        texts = [pair.tokenizer.decode(a) for a in answers]
        misses = [
            (e.prompt, e.answer, t) for e, t in zip(found, texts, strict=True) if e.answer != t
        ]
        for prompt, answer, text in misses[:show_misses]:
            print(f"  {prompt}\n    expected {answer}\n    got      {text}")
        rounds: list[int] = []
        same = 0
        for example, answer in zip(encoded[:chains], answers, strict=False):
            ids, gained = chain(pair, example)
            same += ids == answer
            rounds += gained
        result[name] = {
            "examples": per_kind,
            "exact": round(1 - len(misses) / per_kind, 4),
            "answer_tokens": round(sum(map(len, answers)) / per_kind, 2),
            "chains": chains,
            "chains_equal_to_greedy": same,
            "acceptance_length": round(sum(rounds) / max(1, len(rounds)), 3),
            "first_proposal_accepted": round(sum(g > 1 for g in rounds) / max(1, len(rounds)), 3),
        }
        print(name, result[name], flush=True)
    main = [result[k]["acceptance_length"] for k in KINDS]
    result["mean"] = {"acceptance_length": round(sum(main) / len(main), 3)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=HERE, help="holds target/ and the draft")
    parser.add_argument("--draft", default="draft", help="draft, dflash or dspark")
    parser.add_argument("--per-kind", type=int, default=100)
    parser.add_argument(
        "--chains", type=int, default=25, help="examples per kind decoded speculatively"
    )
    parser.add_argument("--show-misses", type=int, default=0)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pair = load_pair(args.folder, device, args.draft)
    print(json.dumps(evaluate(pair, args.per_kind, args.chains, args.show_misses), indent=2))


if __name__ == "__main__":
    main()
