"""Cost of a grammar per cycle on one GPU: ``python -m benchmarks.grammar``.

A pair of a published geometry in bfloat16 with random weights, through the real scheduler. A JSON
Schema applies to no sequence, one, or all; also to all with drafts filtered by it. Prints medians
of whole steps on the host's clock, the host's time for a tree's masks once its tokens are known,
and the tokens of a cycle. ``benchmarks.grammar_host`` measures the masks alone, without a GPU.
"""

from __future__ import annotations

import base64
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.random_pair import RandomPair, random_pair
from benchmarks.synthetic import size_option
from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.policy.protocol import FixedPolicy
from trt_eagle3.decode.sampling import grammar_masks
from trt_eagle3.decode.sampling.filter_trial import FilterTrial
from trt_eagle3.decode.sampling.grammar import Grammar
from trt_eagle3.decode.sampling.grammar_state import GrammarState
from trt_eagle3.decode.sampling.grammar_text import grammar_text
from trt_eagle3.decode.sampling.sampling_params import GREEDY, SamplingParams
from trt_eagle3.decode.schedule.scheduler import Scheduler
from trt_eagle3.decode.speculation import tree_masks
from trt_eagle3.decode.speculation.tree import AnyTree, configured_tree
from trt_eagle3.io.run_command import run_command

__all__ = [
    "Vocabulary",
    "batches_option",
    "main",
    "nodes_option",
    "state_maker",
    "steps_option",
    "tree_of",
    "vocabulary_option",
]

_CONTEXT, _ROOM, _WARM, _PAGE = 512, 512, 20, 16
_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "size": {"type": "integer"},
        "colour": {"enum": ["red", "green", "blue"]},
        "parts": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "size", "colour", "parts"],
    "additionalProperties": False,
}
_GRAMMAR = Grammar.json_schema({"type": "array", "items": _ITEM, "minItems": 100_000})
_SHARES = ("none", "one", "all", "kept")


class _Fixed(FilterTrial):
    """Filters drafts by the grammar, or does not, whatever the gain."""

    def __init__(self, *, filters: bool) -> None:
        super().__init__()
        self.filters = filters

    def add(self, forbidden: float, num_tokens: int, *, filtered: bool) -> None:
        """Ignore the sample."""


batches_option = click.option(
    "--batch", "batches", multiple=True, type=int, default=(1, 8, 32), show_default=True
)
steps_option = click.option("--steps", default=3, show_default=True, help="Levels of a tree.")
nodes_option = click.option(
    "--nodes", default=8, show_default=True, help="Nodes of a tree that is no chain."
)
vocabulary_option = click.option(
    "--vocabulary",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Tokens in tiktoken's format; without it they are random.",
)


@click.command()
@size_option
@batches_option
@click.option("--mode", "modes", multiple=True, default=("chain", "tree", "dynamic", "plain"))
@steps_option
@nodes_option
@click.option("--cycles", default=40, show_default=True, help="Steps per median.")
@vocabulary_option
def main(
    size: str,
    batches: tuple[int, ...],
    modes: tuple[str, ...],
    steps: int,
    nodes: int,
    cycles: int,
    vocabulary: Path | None,
) -> None:
    """Print step times with and without grammars."""
    names = ("mode", "batch", "grammars", "ms", "over none", "masks ms", "tokens a cycle")
    table = Table(*names, title=f"{size}, random weights")
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        length, most = _CONTEXT + _ROOM, max(batches)
        pair = random_pair(Path(folder), size, _PAGE, max_seq_len=length, max_batch_size=most)
        matcher = state_maker(pair.spec.vocab_size, vocabulary)
        for mode in modes:
            for batch in batches:
                case = _Case(pair, tree_of(mode, steps, nodes), batch, matcher)
                for share, row in zip(_SHARES, case.rows(cycles), strict=False):
                    table.add_row(mode, str(batch), share, *row)
    Console(width=100).print(table, torch.cuda.get_device_name())


def tree_of(mode: str, steps: int, nodes: int) -> AnyTree | None:
    """Return the tree drafted in ``mode``; None without speculation."""
    if mode == "plain":
        return None
    if mode == "chain":
        return configured_tree(SpeculationConfig(mode="chain", steps=steps))
    config = {"mode": mode, "steps": steps, "topk": 4, "num_draft_tokens": nodes}
    return configured_tree(SpeculationConfig.model_validate(config))


class _Case:
    """One tree and batch size; sequences are created anew for every measurement."""

    def __init__(
        self,
        pair: RandomPair,
        tree: AnyTree | None,
        batch: int,
        matcher: Callable[[], GrammarState],
    ) -> None:
        self._pair, self._tree, self._batch, self._matcher = pair, tree, batch, matcher
        self._decoder = pair.decoder(prefill_chunk=2048, drafting=tree is not None)

    def rows(self, cycles: int) -> list[tuple[str, ...]]:
        """Return table cells by share: milliseconds, change over none, of masks, and tokens."""
        shares = _SHARES if self._tree is not None else _SHARES[:-1]
        found = {share: self._measure(share, cycles) for share in shares}
        again = {share: self._measure(share, cycles) for share in reversed(shares)}
        best = {s: min(found[s], again[s]) for s in shares}
        base = best["none"][0]
        return [
            (f"{ms:.2f}", f"{100 * (ms / base - 1):+.1f} %", f"{masks:.2f}", f"{tokens:.2f}")
            for ms, masks, tokens in best.values()
        ]

    def _measure(self, share: str, cycles: int) -> tuple[float, float, float]:
        """Return milliseconds of a step and of its masks, and tokens per sequence and cycle."""
        num_grammars = {"none": 0, "one": 1}.get(share, self._batch)
        scheduler = Scheduler(
            self._decoder, max_batch_size=self._batch, policy=FixedPolicy(self._tree)
        )
        for i in range(self._batch):
            sampling, grammar = GREEDY, None
            if i < num_grammars:
                sampling = SamplingParams(grammar=_GRAMMAR, max_tokens=_ROOM)
                grammar = self._matcher()
                grammar.trial = _Fixed(filters=share == "kept")
            drafting = self._tree is not None
            scheduler.add(self._pair.sequence(_CONTEXT, sampling, grammar, drafting=drafting))
        while scheduler.waiting or any(not s.prefilled for s in scheduler.running):
            scheduler.step()
        timed = _Timed()
        with timed:
            steps, tokens = self._steps(scheduler, cycles)
        for s in list(scheduler.running):
            scheduler.remove(s)
        return 1e3 * median(steps), 1e3 * median(timed.seconds[-cycles:] or [0.0]), tokens

    def _steps(self, scheduler: Scheduler, cycles: int) -> tuple[Sequence[float], float]:
        found, last, tokens = [], 0.0, 0
        for i in range(_WARM + cycles):
            emitted = scheduler.step()
            assert all(e.error is None for e in emitted), [e.error for e in emitted]
            now = time.perf_counter()
            if i >= _WARM:
                found.append(now - last)
                tokens += sum(len(e.tokens) for e in emitted)
            last = now
        return found, tokens / cycles / self._batch


class _Timed:
    """Records the seconds of every computation of masks while it is entered."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._true = grammar_masks.fill_trees

    def __enter__(self) -> None:
        def timed(*args: Any) -> list[list[int]]:
            start = time.perf_counter()
            found = self._true(*args)
            self.seconds.append(time.perf_counter() - start)
            return found

        vars(tree_masks)["fill_trees"] = timed

    def __exit__(self, *_: object) -> None:
        vars(tree_masks)["fill_trees"] = self._true


def state_maker(vocab_size: int, vocabulary: Path | None) -> Callable[[], GrammarState]:
    """Return a function that makes states of the grammar over ``vocab_size`` tokens."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    tokenizer = LLTokenizer(TokenizerWrapper(Vocabulary(vocab_size, vocabulary)))
    first = LLMatcher(tokenizer, grammar_text(_GRAMMAR))
    assert not first.is_error(), first.get_error()
    return lambda: GrammarState(first.deep_copy(), [vocab_size - 1], vocab_size)


class Vocabulary:
    """A tokenizer in the form that llguidance requires of unknown libraries."""

    bos_token_id = None

    def __init__(self, size: int, file: Path | None) -> None:
        tokens = _drawn(size - 1) if file is None else _read(file)
        self.tokens = [*tokens, *[b""] * (size - 1 - len(tokens)), b"<end>"]
        self.eos_token_id, self.special_token_ids = size - 1, [size - 1]
        self._ids = {token: i for i, token in enumerate(self.tokens) if token}

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokenise ``text``, longest tokens first."""
        left, found = text.encode() if isinstance(text, str) else text, []
        while left:
            token = next(left[:n] for n in range(len(left), 0, -1) if left[:n] in self._ids)
            found.append(self._ids[token])
            left = left[len(token) :]
        return found


def _read(file: Path) -> list[bytes]:
    return [base64.b64decode(line.split()[0]) for line in file.read_bytes().splitlines()]


def _drawn(size: int) -> list[bytes]:
    """Return all bytes, then words with and without a leading space, and some punctuation."""
    chance, found = random.Random(0), {bytes([i]): None for i in range(256)}
    letters = "eeeeaaiioouttnnssrrlldcmpghbfywkvxjqz" * 3 + '"{}[]:,.\n 0123456789-_'
    while len(found) < size:
        word = "".join(chance.choices(letters, k=chance.randint(2, 10)))
        found[f"{chance.choice(['', ' '])}{word}".encode()] = None
    return list(found)


if __name__ == "__main__":
    run_command(main)
