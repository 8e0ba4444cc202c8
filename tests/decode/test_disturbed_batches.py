"""Sequences that are disturbed in every way at once say what each says alone.

They come and leave at any time, are preempted, paused and cancelled, begin with pages of others,
have grammars and options; trees change, forwards fail, and graphs overwrite their outputs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.decode.overwriting import OverwritingSession
from tests.decode.pair import NUM_PAGES, PAGE_SIZE, Recorder
from tests.decode.random_tree import random_tree
from tests.decode.recurrent import ANSWERS, guessing
from tests.decode.scheduling import LAYOUTS, MAX_SEQ_LEN, MAX_TOKENS, TREES, TreeFor, pair, prompts
from tests.decode.test_grammar_scheduler import END, alone, answer_of, sequence
from trt_eagle3.decode.forward.runner import DraftRunner, TargetRunner
from trt_eagle3.decode.memory.kv_cache import BatchTable, KVCache, PagePool
from trt_eagle3.decode.memory.prefix_cache import PrefixCache
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.sampling.logits_process import AllowedTokens
from trt_eagle3.decode.schedule.scheduler import Scheduler
from trt_eagle3.decode.speculation import backfill
from trt_eagle3.decode.speculation.tree import AnyTree
from trt_eagle3.decode.step import stepper

SEEDS = 24


class _FailedForwardError(RuntimeError):
    """What a disturbed forward raises."""


class _Disturbed:
    """A scheduler with random sizes, and what happens to its sequences."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.chance = chance = random.Random(seed)
        fixed = chance.random() < 0.8
        table_len = MAX_SEQ_LEN // PAGE_SIZE if fixed else None
        self.pool = PagePool(chance.choice([13, 15, NUM_PAGES]), PAGE_SIZE, table_len)
        self.trees = [*TREES.values(), random_tree(chance)]
        self.tree: AnyTree | None = None
        self.fails = False
        self.lost = set[int]()
        self.failed: list[Exception] = []
        sessions = pair().sessions
        overwriting = {name: OverwritingSession(s) for name, s in sessions.items()}
        theirs = replace(pair(), sessions=overwriting)  # type: ignore[arg-type]
        chunk = chance.choice([5, 16, 64])
        drafter = guessing(theirs, fixed_shapes=fixed, max_rows=chunk)
        shapes: dict[str, Any] = {"fixed_shapes": fixed, "prefill_chunk": chunk}
        decoder = theirs.decoder(
            Recorder(), MAX_SEQ_LEN, drafter, run_ahead=chance.random() < 0.8, **shapes
        )
        self.scheduler = Scheduler(
            decoder,
            max_batch_size=chance.choice([1, 3, 5]),
            policy=TreeFor(lambda _: self.tree),
            prefix_cache=PrefixCache(self.pool) if chance.random() < 0.7 else None,
        )
        patch.setattr(stepper, "_LAUNCHED_AHEAD", chance.choice([1, 2, 8]))
        patch.setattr(backfill, "MAX_DEFERRED", chance.choice([2, 8, 512]))
        runner = chance.choice([TargetRunner, DraftRunner])
        patch.setattr(runner, "forward", self._failing(runner.forward, after=chance.random() < 0.5))

    def _failing(self, forward: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
        def failing(*args: Any, **options: Any) -> Any:
            fails, self.fails = self.fails, False
            found = forward(*args, **options) if after or not fails else None
            if fails:
                raise _FailedForwardError
            return found

        return failing

    @property
    def sequences(self) -> list[SequenceState]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def run(self, asked: Sequence[SequenceState]) -> None:
        """Until each has its answer, or is among the ``lost``."""
        coming, chance = [*asked], self.chance
        while coming or self.sequences:
            if coming and chance.random() < 0.4:
                self.scheduler.add(coming.pop())
            self._disturb()
            try:
                emissions = self.scheduler.step()
            except _FailedForwardError:
                self.lost |= {id(s) for s in self.scheduler.reset()}
                continue
            for emission in emissions:
                s = emission.sequence
                if emission.error is not None:
                    self.failed.append(emission.error)
                elif len(s.tokens) >= MAX_TOKENS or END in s.tokens or emission.full:
                    self.scheduler.remove(s)

    def _disturb(self) -> None:
        chance, scheduler = self.chance, self.scheduler
        if chance.random() < 0.2:
            self.tree = chance.choice(self.trees)
        if scheduler.running and chance.random() < 0.1:
            scheduler._preempt(chance.choice(scheduler.running))
        if self.sequences and chance.random() < 0.02:
            cancelled = chance.choice(self.sequences)
            scheduler.remove(cancelled)
            self.lost.add(id(cancelled))
        self.fails = chance.random() < 0.01
        for s in self.sequences:
            s.backpressured = chance.random() < 0.1


def differing(seeds: range, patch: pytest.MonkeyPatch) -> Iterator[int]:
    """In which runs any sequence says anything else than alone; in no run are pages lost."""
    for i in range(len(LAYOUTS)):
        ANSWERS[id(prompts()[i])] = alone(i)[0]
    for seed in seeds:
        with patch.context() as here, torch.inference_mode():
            run = _Disturbed(seed, here)
            which = [run.chance.randrange(len(LAYOUTS)) for _ in range(run.chance.randint(3, 9))]
            asked = [sequence(i, run.pool, run.chance.random() < 0.7) for i in which]
            run.run(asked)
        assert run.pool.num_used == run.pool.num_idle, f"seed {seed}: pages leaked"
        expected = {id(s): alone(i)[0] for i, s in zip(which, asked, strict=True)}
        right = all(
            answer_of(s) == expected[id(s)][: len(s.tokens) if id(s) in run.lost else None]
            for s in asked
        )
        if run.failed or not right:
            yield seed


def test_disturbed_sequences_say_what_each_says_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(differing(range(SEEDS), monkeypatch)) == []


def stale_page_tables(patch: pytest.MonkeyPatch) -> None:
    """As they were when the same sequences had as many pages."""
    of, known = BatchTable.of, dict[Any, torch.Tensor]()

    def stale(self: BatchTable, tables: Any, num_rows: Any, size: int | None = None) -> Any:
        held = ((table, table.count(n)) for table, n in zip(tables, num_rows, strict=True))
        key = self, *held, size
        if key not in known:
            known[key] = of(self, tables, num_rows, size)
        return known[key]

    patch.setattr(BatchTable, "of", stale)


def masks_of_others(patch: pytest.MonkeyPatch) -> None:
    """Each mask is taken for that of the next node that has one."""
    places = AllowedTokens.places
    patch.setattr(AllowedTokens, "places", lambda self, count: places(self, count).roll(1))


def rows_left_in_place(patch: pytest.MonkeyPatch) -> None:
    """Accepted rows of trees are not moved together."""
    patch.setattr(KVCache, "move", lambda *_: None)


@pytest.mark.parametrize("plant", [stale_page_tables, masks_of_others, rows_left_in_place])
def test_fault_in_disturbed_batches_changes_answers(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(len(LAYOUTS)):
        alone(i)  # before it is planted
    plant(monkeypatch)
    assert next(differing(range(SEEDS), monkeypatch), None) is not None
