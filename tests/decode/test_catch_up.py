"""A draft that catches up: which rows run together, in which shapes, and that it knows afterwards
what it would have known.
"""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trt_eagle3.decode.speculation.catch_up import CatchUp

from tests.decode.pair import NUM_PAGES, PAGE_SIZE
from tests.decode.scheduling import CHAIN, MAX_SEQ_LEN, make_scheduler, pair, prompts
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.sequence import DraftState
from trt_eagle3.decode.warm_up import run_catch_ups
from trt_eagle3.engine.buckets import CAPTURED_AT_RUN

VOCAB = 12  # of the pair


def pool(*, fixed: bool = True) -> PagePool:
    return PagePool(NUM_PAGES, PAGE_SIZE, table_len=MAX_SEQ_LEN // PAGE_SIZE if fixed else None)


def shapes(counts: list[int], *, max_rows: int = 2048, **options: Any) -> list[tuple[int, int]]:
    """(sequences, rows of each) of the forwards over sequences that lack ``counts`` rows."""
    options = {"max_sequences": None, "fixed_shapes": True} | options
    asked: list[Any] = [SimpleNamespace(deferred=[None] * n) for n in counts]
    found = CatchUp(None, max_rows=max_rows, **options)._groups(asked)  # type: ignore[arg-type]
    groups = list(found)
    ran = [s for together, _ in groups for s in together]
    assert {id(s) for s in ran} == {id(s) for s in asked if s.deferred}
    assert all(len(s.deferred) <= width for together, width in groups for s in together)
    return [(len(together), width) for together, width in groups]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([0], []),
        ([1], [(1, 1)]),
        ([79], [(1, 128)]),
        ([63, 64], [(2, 64)]),
        ([5, 6, 7], [(4, 8)]),
        ([1, 0, 300], [(2, 512)]),
        ([512] * 5, [(4, 512), (1, 512)]),
    ],
)
def test_shapes_are_powers_of_two(counts: list[int], expected: list[tuple[int, int]]) -> None:
    assert shapes(counts) == expected


def test_chunks_of_odd_size_and_engines_of_few_sequences_are_not_exceeded() -> None:
    assert shapes([90], max_rows=100) == [(1, 100)]
    assert shapes([33, 20, 20], max_rows=100) == [(1, 64), (2, 32)]
    assert shapes([5, 6, 7], max_sequences=3) == [(3, 8)]
    assert shapes([5], max_sequences=1) == [(1, 8)]


def test_nothing_is_padded_where_shapes_are_free() -> None:
    assert shapes([5, 6, 7], fixed_shapes=False) == [(3, 7)]
    assert shapes([60, 50, 3], fixed_shapes=False, max_rows=120) == [(2, 60), (1, 3)]


def drafted(*, fixed: bool, together: bool) -> list[DraftState]:
    """Of three sequences whose drafts caught up with what was decoded plainly."""
    pages = pool(fixed=fixed)
    scheduler = make_scheduler(pages, None, lambda _: None, chunk=64)
    asked = [pair().sequence(prompts()[i], pages, drafting=True) for i in (0, 2, 5)]
    for s in asked:
        scheduler.add(s)
    while len(asked[-1].tokens) < 6:
        scheduler.step()
    catch_up = scheduler._decoder.catch_up
    assert catch_up is not None
    assert all(len(s.deferred) == 5 for s in asked)
    for some in [asked] if together else [[s] for s in asked]:
        catch_up.run(some)
    assert all(not s.deferred and s.draft_length == s.length for s in asked)
    return [s.draft for s in asked if s.draft]


def test_padded_drafts_that_catch_up_together_know_what_each_knows_alone() -> None:
    alone = drafted(fixed=False, together=False)
    for found, expected in zip(drafted(fixed=True, together=True), alone, strict=True):
        torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-4)
        torch.testing.assert_close(found.features, expected.features, rtol=0, atol=1e-4)


def test_draft_that_catches_up_with_a_row_too_few_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = drafted(fixed=False, together=False)
    run = CatchUp._run

    def short(self: CatchUp, sequences: Any, width: int) -> None:
        for s in sequences:
            s.deferred[-1] = s.deferred[0]
        run(self, sequences, width)

    monkeypatch.setattr(CatchUp, "_run", short)
    wrong = drafted(fixed=True, together=True)
    assert not any(
        torch.allclose(found.features, expected.features, rtol=0, atol=1e-4)
        for found, expected in zip(wrong, alone, strict=True)
    )


def test_shapes_of_few_sequences_run_ahead_as_often_as_captures_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = pool()
    decoder = make_scheduler(pages, None, lambda _: CHAIN, chunk=16)._decoder
    ran = Counter[tuple[int, int]]()
    run = CatchUp._run

    def counted(self: CatchUp, sequences: Any, width: int) -> None:
        ran[len(sequences), width] += 1
        run(self, sequences, width)

    monkeypatch.setattr(CatchUp, "_run", counted)
    assert run_catch_ups(decoder, pages, VOCAB) == len(ran) == 5 + 4 + 3
    assert set(ran.values()) == {CAPTURED_AT_RUN}
    assert set(ran) == {(n, 1 << i) for n in (1, 2, 4) for i in range(5) if n << i <= 16}
    assert pages.num_used == 0


def test_engine_of_one_sequence_runs_none_of_two_ahead() -> None:
    pages = pool()
    decoder = make_scheduler(pages, None, lambda _: CHAIN, chunk=16)._decoder
    assert decoder.catch_up is not None
    decoder.catch_up.max_sequences = 1
    assert run_catch_ups(decoder, pages, VOCAB) == 5


def test_shape_that_memory_does_not_hold_is_left_to_whoever_needs_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that cannot run it ahead starts all the same."""
    pages = pool()
    decoder = make_scheduler(pages, None, lambda _: CHAIN, chunk=16)._decoder
    run = CatchUp._run

    def too_large(self: CatchUp, sequences: Any, width: int) -> None:
        if len(sequences) * width == 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        run(self, sequences, width)

    monkeypatch.setattr(CatchUp, "_run", too_large)
    assert run_catch_ups(decoder, pages, VOCAB) == 4 + 3 + 2
    assert pages.num_used == 0
    assert [r.message for r in caplog.records] == [
        "a draft that catches up: 16 rows at once need more memory than this GPU has free. "
        "Rebuild with a smaller engine.prefill_chunk."
    ] * 3


@pytest.mark.parametrize("chunk", [1, 3, 12, 16, 40, 64])
@pytest.mark.parametrize("max_sequences", [1, 3, 4, None])
def test_few_sequences_catch_up_in_shapes_that_have_run(
    chunk: int, max_sequences: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, lengths and batches may be of any size; rows past the length limit are padding."""
    pages = pool()
    decoder = make_scheduler(pages, None, lambda _: CHAIN, chunk=chunk)._decoder
    assert decoder.catch_up is not None
    decoder.catch_up.max_sequences = max_sequences
    ran = set[tuple[int, int]]()
    extend = CatchUp._run
    seen = Counter[int]()

    def counted(self: CatchUp, sequences: Any, width: int) -> None:
        ran.add((len(sequences), width))
        seen[len(sequences)] += 1
        if seen[len(sequences)] < 3:  # that they can is enough to see
            extend(self, sequences, width)

    monkeypatch.setattr(CatchUp, "_run", counted)
    assert run_catch_ups(decoder, pages, VOCAB) == len(ran)
    most = min(decoder.catch_up.max_deferred, MAX_SEQ_LEN - 1)
    draw = random.Random(0)
    for _ in range(200):
        counts = [draw.randint(1, most) for _ in range(draw.randint(1, min(max_sequences or 4, 4)))]
        assert set(shapes(counts, max_rows=chunk, max_sequences=max_sequences)) <= ran
