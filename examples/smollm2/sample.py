"""Open prompts that the target writes itself, and its answers to them.

A user's turn is begun with a few words, or with none, and the target continues it: an instruct
model was trained on whole conversations. The held-out prompts of ``prompts.json`` were written
apart; a turn that shares eight words in a row with one of them is dropped.

# Shapes: B prompts, V vocabulary
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

__all__ = ["Answer", "answers", "sample"]

HERE = Path(__file__).parent
TURN_TOKENS, ANSWER_TOKENS = 96, 256
TURN_TEMPERATURE = 0.8
ANSWER_TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
SHARED_WORDS = 8
STARTS = {
    "chat": (
        *[""] * 6,
        "What is", "Why do", "How can I", "How does", "Explain", "Tell me about", "I feel",
        "I want to", "Can you", "Give me", "Describe", "Write a story about", "Write an email",
        "What are", "Who was", "Should I", "My", "Suggest", "Compare",
    ),
    "code": (
        "Write a Python function that", "Write a Python program to", "Write a SQL query",
        "Write a JavaScript function", "Explain this code:\n\n", "How do I fix this error in",
        "Write a C program", "Write a Python class", "What does the Python", "Write a bash",
        "Implement", "How do I use git to",
    ),
    "mathematics": (
        "What is the", "Solve the equation", "Solve for x:", "If a", "A train", "A rectangle",
        "John has", "Calculate", "What is the probability", "Find the", "How many",
        "What is the area of", "A store sells", "Explain how to multiply", "Prove that",
    ),
    "summary": (
        "Summarise this text in two sentences:\n\n", "Give a short summary:\n\n",
        "What is the main idea of this passage?\n\n", "Summarize the following text:\n\n",
    ),
    "translation": (
        "Translate this sentence into French:", "Translate into Spanish:",
        "Translate this sentence into German:", "Translate to Italian:",
        "Translate the following sentence into French:", "How do you say",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """A prompt with the target's answer: token ids, and how many of them are the prompt's."""

    ids: list[int]
    prompt_len: int


def _choose(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Next tokens [B] of ``logits`` [B, V]; greedy where the temperature is 0."""
    best = logits.argmax(-1)
    heat = temperatures.clamp(min=1e-3)[:, None]
    drawn = torch.multinomial((logits.float() / heat).softmax(-1), 1)[:, 0]
    return torch.where(temperatures == 0, best, drawn)


@torch.inference_mode()
def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    max_new: int,
    end: int,
    deadline: float,
) -> list[list[int]]:
    """Continue all prompts in one batch.

    Args:
        end: token that ends an answer; it is kept.
        deadline: ``time.monotonic()`` after which no further token is sampled.
    """
    device, width = model.device, max(map(len, prompts))
    padded = [[end] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    inputs = torch.tensor(padded, device=device)
    heat, cache = torch.tensor(temperatures, device=device), DynamicCache(config=model.config)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    position, found = (mask.cumsum(-1) - 1).clamp(min=0), []
    for step in range(max_new):
        out = model(
            inputs,
            attention_mask=mask,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        token = _choose(out.logits[:, -1], heat)
        found.append(token)
        done |= token == end
        if step % 16 == 15 and (bool(done.all()) or time.monotonic() > deadline):
            break
        inputs, position = token[:, None], position[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(inputs)], dim=1)
    rows = torch.stack(found, dim=1).tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def _word_runs(text: str) -> set[tuple[str, ...]]:
    words = text.lower().split()
    return {tuple(words[i : i + SHARED_WORDS]) for i in range(len(words) - SHARED_WORDS + 1)}


class Asker:
    """Writes prompts with the target."""

    def __init__(self, model: Any, tokenizer: Any, seed: int) -> None:
        self.model, self.tokenizer, self.rng = model, tokenizer, random.Random(seed)
        entries = json.loads((HERE / "prompts.json").read_text(encoding="utf-8"))
        self.held_out = set[tuple[str, ...]]().union(*(_word_runs(e["prompt"]) for e in entries))
        empty = [{"role": "user", "content": "|"}]
        text = tokenizer.apply_chat_template(empty, tokenize=False, add_generation_prompt=True)
        self.before, self.after = text.split("|<|im_end|>")
        self.after = f"<|im_end|>{self.after}"

    def encode(self, text: str) -> list[int]:
        """Token ids of a text of the template."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def turns(self, count: int, deadline: float) -> list[str]:
        """Return texts of up to ``count`` new turns."""
        kinds = self.rng.choices(list(STARTS), k=count)
        starts = [self.rng.choice(STARTS[kind]) for kind in kinds]
        heat, end = [TURN_TEMPERATURE] * count, self.tokenizer.eos_token_id
        prompts = [self.encode(self.before + start) for start in starts]
        sampled = sample(self.model, prompts, heat, TURN_TOKENS, end, deadline)
        texts = [
            start + self.tokenizer.decode(ids[:-1])
            for start, ids in zip(starts, sampled, strict=True)
            if ids[-1] == end
        ]
        return [text for text in texts if text.strip() and not _word_runs(text) & self.held_out]

    def summaries(self, found: Sequence[Answer], count: int) -> list[str]:
        """Return turns that ask for summaries of earlier answers."""
        some = self.rng.sample(list(found), min(count, len(found)))
        texts = [
            self.tokenizer.decode(a.ids[a.prompt_len :], skip_special_tokens=True) for a in some
        ]
        return [self.rng.choice(STARTS["summary"]) + " ".join(t.split()[:100]) for t in texts]


def answers(
    model: Any, tokenizer: Any, seed: int, batch_size: int, deadline: float
) -> Iterator[list[Answer]]:
    """Yield batches of answers until ``deadline``; three in four of their turns are new, the others
    ask for summaries of answers before.
    """
    asker, end, found = Asker(model, tokenizer, seed), tokenizer.eos_token_id, list[Answer]()
    while time.monotonic() < deadline:
        turns = asker.turns(batch_size, deadline)
        turns += asker.summaries(found, batch_size // 4)
        if not turns:
            continue
        prompts = [asker.encode(f"{asker.before}{turn}{asker.after}") for turn in turns]
        heat = asker.rng.choices(ANSWER_TEMPERATURES, k=len(prompts))
        sampled = sample(model, prompts, heat, ANSWER_TOKENS, end, deadline)
        batch = [
            Answer([*prompt, *ids], len(prompt))
            for prompt, ids in zip(prompts, sampled, strict=True)
            if len(ids) > 8
        ]
        found += batch
        yield batch
