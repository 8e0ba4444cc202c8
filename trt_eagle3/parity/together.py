"""Every prompt at once, as in service: batches, prefixes that are reused, sequences put off and
computed again.

Alone, a prompt runs in the first row of a batch, over fresh pages that never run out, its pictures
just looked at. Here all are asked together, twice, the second time over fewer pages than they need,
and must be answered as they were alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from trt_eagle3.decode.answer import Answer as Reply
from trt_eagle3.decode.request import Generation, Request
from trt_eagle3.decode.sampling_params import SamplingParams
from trt_eagle3.parity.answers import Answer, kept_columns
from trt_eagle3.parity.board import Board
from trt_eagle3.parity.metrics import row_errors
from trt_eagle3.parity.record import Pass, RecordingEngine
from trt_eagle3.parity.target_check import CheckedTarget
from trt_eagle3.parity.token_check import (
    Mismatch,
    enumerate_logits,
    mismatch_of,
    note_mismatches,
    path_rows,
)
from trt_eagle3.parity.trace import all_rows_of

__all__ = ["ROUNDS", "Together", "answer_together", "check_together"]

ROUNDS = 2
"""The second finds the pages of the first, and has too few."""


@dataclass(frozen=True)
class Together:
    """All prompts asked at once.

    Attributes:
        replies: by round, in the order of the cases. passes: of the target. columns: kept of its
            logits; None: all.
        alike: by round, whether it speculated as each prompt alone did.
        put_off: sequences that had to make room. reused: rows of prompts that were found computed.
    """

    replies: Sequence[Sequence[Generation]]
    passes: Sequence[Pass]
    columns: Tensor | None
    alike: Sequence[bool]
    preempt: int
    reused: int


def answer_together(
    engine: RecordingEngine,
    answers: Sequence[Answer],
    max_tokens: int,
    progress: Callable[[], object],
) -> Together:
    """Ask all cases again, together; the second round speculates by the bundle's own plan."""
    served = engine.served
    engine.take()
    engine.begin_service()
    engine.kept.only = "target"
    engine.kept.columns = kept_columns(engine, engine.limits.max_batch_size)
    replies = []
    for number in range(ROUNDS):
        if number:
            engine.leave_pages(_num_pages(engine, answers))
            engine.use_plan(served or engine.plan)
        replies.append(_ask(engine, answers, max_tokens))
        progress()
    now = engine.metrics()
    found = Together(
        replies=replies,
        passes=engine.take(),
        columns=engine.kept.columns,
        alike=[True] + [served is None] * (ROUNDS - 1),
        preempt=now.preempted,
        reused=now.reused_tokens,
    )
    engine.kept.only, engine.kept.columns = None, kept_columns(engine)
    return found


def _num_pages(engine: RecordingEngine, answers: Sequence[Answer]) -> int:
    """Pages for a batch's prompts and first cycles, but not for all of its answers; enough for
    the longest alone.
    """
    size, most = engine.page_size, engine.limits.max_batch_size
    prompts = sum(-(-(a.prompt_len + engine.num_tree_rows) // size) for a in answers[:most])
    longest = max(a.prompt_len + len(a.plain) + engine.num_tree_rows for a in answers)
    return max(prompts, -(-min(longest, engine.limits.max_seq_len) // size))


def _ask(engine: RecordingEngine, answers: Sequence[Answer], max_tokens: int) -> list[Generation]:
    """All at once, or as many as may wait; each has its own reader, as in service."""
    found: list[Generation] = []
    wave, sampling = (
        engine.limits.max_waiting,
        SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    )
    for start in range(0, len(answers), wave):
        questions = [answer.case.question for answer in answers[start : start + wave]]
        asked = engine.submit_together(
            [Request(q.prompt, q.images, q.videos, sampling) for q in questions]
        )
        with ThreadPoolExecutor(len(asked)) as readers:
            found += readers.map(Reply.finish, asked)
    return found


def check_together(
    board: Board,
    together: Together,
    targets: Sequence[CheckedTarget],
    embed: Callable[[Tensor], Tensor],
    decode: Callable[[Sequence[int]], str],
) -> list[Mismatch]:
    """The ``batch`` gates; ``embed``: token ids to embeddings as the engine has them, by which
    rows are known.
    """
    mismatches = _check_tokens(board, together, targets, decode)
    _check_logits(board, together, targets, embed)
    _check_acceptance(board, together, targets)
    return mismatches


def _check_tokens(
    board: Board,
    together: Together,
    targets: Sequence[CheckedTarget],
    decode: Callable[[Sequence[int]], str],
) -> list[Mismatch]:
    found: list[Mismatch] = []
    for replies in together.replies:
        for t, reply in zip(targets, replies, strict=True):
            alone, output_ids, differ = t.answer.plain, reply.token_ids, []
            same = _agreed(alone, output_ids)
            if same < min(len(alone), len(output_ids)):
                differ.append(
                    mismatch_of(
                        board, t, "batch.tokens", same, alone[same], output_ids[same], decode
                    )
                )
            elif len(alone) != len(output_ids):
                detail = f"{len(alone)} tokens alone, {len(output_ids)} together"
                board.add("batch.tokens", 1, t.answer.name, "tokens", None, detail)
            note_mismatches(board, "batch.tokens", t.answer, differ, same)
            found += differ
    widest = max((len(all_rows_of(p)) for p in together.passes), default=0)
    board.count(
        "batch.tokens",
        most_at_once=widest,
        preempt=together.preempt,
        prompt_rows_reused=together.reused,
    )
    return found


def _agreed(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens at the start that are the same."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    )


def _check_logits(
    board: Board,
    together: Together,
    targets: Sequence[CheckedTarget],
    embed: Callable[[Tensor], Tensor],
) -> None:
    """Every row of every verify pass that stands on an answer, against the reference's logits of
    that row.
    """
    tables = []
    # past the first token that differs, rows stand on other answers
    for i, t in enumerate(targets):
        agreed = min(_agreed(t.answer.plain, replies[i].token_ids) for replies in together.replies)
        tables.append(embed(t.answer.token_ids[: t.answer.prompt_len + agreed]))
    errors: dict[int, list[float]] = {}
    strangers = 0
    for p in together.passes:
        for rows in all_rows_of(p):
            given = dict(enumerate_logits(p, rows))
            known = [
                (i, row_error)
                for i, (t, table) in enumerate(zip(targets, tables, strict=True))
                if (row_error := _errors(given, path_rows(p, rows, table), t, together.columns))
            ]
            if known:  # two prompts may have the same token at the same row
                i, found = min(known, key=lambda one: max(one[1]))
                errors.setdefault(i, []).extend(found)
            elif rows.past >= max(t.answer.prompt_len for t in targets):
                strangers += 1
    for i, found in errors.items():
        board.add_rows("batch.logits", torch.tensor(found), targets[i].answer.name, "logits")
    if not errors:
        detail = f"{strangers} rows, none of them on an answer"
        board.add("batch.logits", float("inf"), "", "logits", None, detail)


def _errors(
    given: Mapping[int, Tensor], nodes: Mapping[int, int], t: CheckedTarget, columns: Tensor | None
) -> list[float]:
    """Errors of the logits ``given`` at the ``nodes`` of a pass that stand on rows of this
    answer.
    """
    first = t.answer.prompt_len - 1
    found = []
    for row, node in nodes.items():
        if node in given and first < row < first + len(t.logits):
            wanted = t.logits[row - first]
            wanted = wanted if columns is None else wanted[columns]
            found.append(float(row_errors(given[node][None], wanted[None])))
    return found


def _check_acceptance(board: Board, together: Together, targets: Sequence[CheckedTarget]) -> None:
    """Shares of verify passes that accepted so deep, together and alone, of answers that are the
    same in both.
    """
    alone: list[int] = []
    lengths: list[int] = []
    for replies in (r for r, alike in zip(together.replies, together.alike, strict=True) if alike):
        for t, reply in zip(targets, replies, strict=True):
            # past a tie, other tokens are accepted otherwise
            if reply.token_ids == t.answer.speculative:
                alone += t.answer.accepted_lengths
                lengths += reply.accepted_lengths
    if not alone:
        drafted = any(t.answer.speculative for t in targets)
        reason = (
            "no answer is the same together and alone" if drafted else "a bundle without a draft"
        )
        board.skip(["batch.acceptance"], reason)
        return
    spare = 1 if board.limit("batch.acceptance").value > 0 else 0
    for position in range(max(*alone, *lengths) - 1):
        ours, theirs = (sum(n - 1 > position for n in some) for some in (lengths, alone))
        detail = f"{theirs} of {len(alone)} cycles alone, {ours} of {len(lengths)} together"
        value = max(0, abs(ours - theirs) - spare) / len(alone)
        board.add("batch.acceptance", value, "", f"position {position}", None, detail)
