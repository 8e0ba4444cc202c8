"""Backfill: which deferred rows run in one forward, in which shapes, and that the draft then has
what it would have had.
"""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.decode.pair import NUM_PAGES, PAGE_SIZE
from tests.decode.scheduling import CHAIN, MAX_SEQ_LEN, make_scheduler, pair, prompts
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.speculation.backfill import DraftBackfill
from trt_eagle3.decode.speculation.eagle import LastRow
from trt_eagle3.decode.step.decoder import Decoder
from trt_eagle3.decode.warm_up import run_backfills
from trt_eagle3.engine.runtime.buckets import CAPTURED_AT_RUN

VOCAB = 12  # of the pair


def shapes(counts: list[int], *, max_rows: int = 2048, **options: Any) -> list[tuple[int, int]]:
    """(sequences, rows of each) of the forwards over sequences that lack ``counts`` rows."""
    options = {"max_sequences": None, "fixed_shapes": True, "max_rows": max_rows} | options
    lacking: list[Any] = [SimpleNamespace(deferred=[None] * n) for n in counts]
    backfill = DraftBackfill(None, 0, None, **options)
    groups = list(backfill._groups(lacking))
    assert {id(s) for group, _ in groups for s in group} == {id(s) for s in lacking if s.deferred}
    assert all(len(s.deferred) <= width for group, width in groups for s in group)
    return [(len(group), width) for group, width in groups]


@pytest.mark.parametrize(
    ("counts", "options", "expected"),
    [
        ([0], {}, []),
        ([1], {}, [(1, 1)]),
        ([79], {}, [(1, 128)]),
        ([63, 64], {}, [(2, 64)]),
        ([5, 6, 7], {}, [(4, 8)]),
        ([1, 0, 300], {}, [(2, 512)]),
        ([512] * 5, {}, [(4, 512), (1, 512)]),
        # chunks of odd size and engines of few sequences are not exceeded
        ([90], {"max_rows": 100}, [(1, 100)]),
        ([33, 20, 20], {"max_rows": 100}, [(1, 64), (2, 32)]),
        ([5, 6, 7], {"max_sequences": 3}, [(3, 8)]),
        ([5], {"max_sequences": 1}, [(1, 8)]),
        # nothing is padded where shapes are free
        ([5, 6, 7], {"fixed_shapes": False}, [(3, 7)]),
        ([60, 50, 3], {"fixed_shapes": False, "max_rows": 120}, [(2, 60), (1, 3)]),
    ],
)
def test_shapes_are_powers_of_two_within_the_limits(
    counts: list[int], options: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    assert shapes(counts, **options) == expected


def backfilled(*, fixed: bool, batched: bool) -> list[LastRow]:
    """Of three sequences that were decoded without the draft, and then backfilled."""
    pool = PagePool(NUM_PAGES, PAGE_SIZE, table_len=MAX_SEQ_LEN // PAGE_SIZE if fixed else None)
    scheduler = make_scheduler(pool, None, lambda _: None, chunk=64)
    sequences = [pair().sequence(prompts()[i], pool, drafting=True) for i in (0, 2, 5)]
    for s in sequences:
        scheduler.add(s)
    while len(sequences[-1].tokens) < 6:
        scheduler.step()
    backfill = scheduler._decoder.drafter.backfill
    assert all(len(s.deferred) == 5 for s in sequences)
    runs = [backfill.run(some) for some in ([sequences] if batched else [[s] for s in sequences])]
    assert sum(runs) == 15
    assert all(
        not s.deferred and s.num_draft_computed_tokens == s.num_computed_tokens for s in sequences
    )
    return [s.draft for s in sequences if s.draft]


def close(found: list[LastRow], expected: list[LastRow]) -> list[bool]:
    return [
        torch.allclose(getattr(a, name), getattr(b, name), rtol=0, atol=1e-4)
        for a, b in zip(found, expected, strict=True)
        for name in ("logits", "features")
    ]


def test_padded_batch_gives_the_draft_what_each_sequence_alone_does() -> None:
    alone = backfilled(fixed=False, batched=False)
    assert close(backfilled(fixed=True, batched=True), alone) == [True] * 6


def test_wrong_last_row_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = backfilled(fixed=False, batched=False)
    run = DraftBackfill._run

    def wrong(self: DraftBackfill, sequences: Any, width: int) -> None:
        for s in sequences:
            s.deferred[-1] = s.deferred[0]
        run(self, sequences, width)

    monkeypatch.setattr(DraftBackfill, "_run", wrong)
    assert not any(close(backfilled(fixed=True, batched=True), alone))


def warming(
    patch: pytest.MonkeyPatch, chunk: int = 16, max_sequences: int | None = None, fails: int = 0
) -> tuple[int, Counter[tuple[int, int]], Decoder]:
    """``run_backfills``: shapes that it counts, how often each ran, and its decoder.

    ``fails``: rows of forwards that memory does not hold.
    """
    pool = PagePool(NUM_PAGES, PAGE_SIZE, table_len=MAX_SEQ_LEN // PAGE_SIZE)
    decoder = make_scheduler(pool, None, lambda _: CHAIN, chunk=chunk)._decoder
    assert decoder.drafter is not None
    decoder.drafter.backfill.max_sequences = max_sequences
    ran, run = Counter[tuple[int, int]](), DraftBackfill._run

    def counted(self: DraftBackfill, sequences: Any, width: int) -> None:
        if len(sequences) * width == fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        ran[len(sequences), width] += 1
        if ran[len(sequences), width] == 1:  # that it can run is enough to see
            run(self, sequences, width)

    patch.setattr(DraftBackfill, "_run", counted)
    count = run_backfills(decoder, pool, VOCAB)
    assert pool.num_used == 0
    return count, ran, decoder


def test_shapes_of_few_sequences_run_ahead_as_often_as_captures_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, ran, _ = warming(monkeypatch)
    assert count == len(ran) == 5 + 4 + 3
    assert set(ran.values()) == {CAPTURED_AT_RUN}
    assert set(ran) == {(n, 1 << i) for n in (1, 2, 4) for i in range(5) if n << i <= 16}


def test_shape_that_memory_does_not_hold_is_left_to_requests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that cannot run it ahead starts all the same."""
    assert warming(monkeypatch, fails=16)[0] == 4 + 3 + 2
    assert [r.message for r in caplog.records] == [
        "a draft's backfill: 16 rows at once need more memory than this GPU has free. "
        "Rebuild with a smaller engine.prefill_chunk."
    ] * 3


@pytest.mark.parametrize("chunk", [1, 3, 12, 16, 40, 64])
@pytest.mark.parametrize("max_sequences", [1, 3, 4, None])
def test_few_sequences_are_backfilled_in_shapes_that_have_run(
    chunk: int, max_sequences: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, lengths and batches may be of any size; rows past the length limit are padding."""
    count, ran, decoder = warming(monkeypatch, chunk, max_sequences)
    assert count == len(ran)
    assert max_sequences != 1 or {n for n, _ in ran} == {1}
    most = min(decoder.drafter.backfill.max_deferred, MAX_SEQ_LEN - 1)
    draw = random.Random(0)
    for _ in range(200):
        counts = [draw.randint(1, most) for _ in range(draw.randint(1, min(max_sequences or 4, 4)))]
        assert {*shapes(counts, max_rows=chunk, max_sequences=max_sequences)} <= {*ran}
