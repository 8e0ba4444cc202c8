"""Gates on tokens: plain against the reference, speculative against plain; and which mismatch is a
tie.

A mismatch is a tie if the reference prefers its own token by less than the compute type can tell
apart (``tie_margin`` times the root mean square of its logits). Everything else is a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trt_eagle3.parity.answers import Answer
from trt_eagle3.parity.board import Board
from trt_eagle3.parity.metrics import row_errors, sizes
from trt_eagle3.parity.record import Pass
from trt_eagle3.parity.target_check import CheckedTarget
from trt_eagle3.parity.trace import Rows, logits_of, rows_of

__all__ = [
    "Mismatch",
    "check_tokens",
    "check_verify",
    "enumerate_logits",
    "mismatch_of",
    "note_mismatches",
    "parents_of",
    "path_rows",
]


@dataclass(frozen=True)
class Mismatch:
    """Two tokens where one was expected.

    Attributes:
        gate: ``tokens.plain`` (expected: the reference's token), ``tokens.speculative`` or
            ``batch.tokens`` (expected: the plain one, alone).
        step: token of the answer, from 0. margin: how far the reference's best two logits are
            apart.
        expected_margin, got_margin: how far each of the two tokens is below the reference's best
            logit.
        bound: the margin below which it is a tie.
    """

    gate: str
    case: str
    step: int
    expected: int
    got: int
    expected_text: str
    got_text: str
    margin: float
    expected_margin: float
    got_margin: float
    bound: float
    verdict: Literal["tie", "failure"]


def check_tokens(board: Board, t: CheckedTarget, decode: object) -> list[Mismatch]:
    """Both token gates of one answer; ``decode`` makes a text of token ids."""
    answer, best = t.answer, t.logits.argmax(dim=-1).tolist()
    found = [
        mismatch_of(board, t, "tokens.plain", step, best[step], got, decode)
        for step, got in enumerate(answer.plain)
        if got != best[step]
    ]
    note_mismatches(board, "tokens.plain", answer, found, len(answer.plain))
    if answer.speculative:
        split = answer.agreed
        differ = []
        if split < min(len(answer.plain), len(answer.speculative)):
            pair = answer.plain[split], answer.speculative[split]
            differ.append(mismatch_of(board, t, "tokens.speculative", split, *pair, decode))
        elif len(answer.plain) != len(answer.speculative):
            detail = f"{len(answer.plain)} tokens plain, {len(answer.speculative)} speculative"
            board.add("tokens.speculative", 1, answer.name, "tokens", None, detail)
        note_mismatches(board, "tokens.speculative", answer, differ, split)
        found += differ
    return found


def note_mismatches(
    board: Board, gate: str, answer: Answer, found: Sequence[Mismatch], compared: int
) -> None:
    """Count the failures among the mismatches ``found`` over so many tokens."""
    failed = [m for m in found if m.verdict == "failure"]
    row = answer.prompt_len + failed[0].step if failed else None
    ties = len(found) - len(failed)
    board.count(gate, tokens_compared=compared, ties=ties)
    detail = f"{len(failed)} of {compared} tokens, first at step {failed[0].step}" if failed else ""
    board.add(gate, len(failed), answer.name, "tokens", row, detail)


def mismatch_of(
    board: Board, t: CheckedTarget, gate: str, step: int, expected: int, got: int, decode: object
) -> Mismatch:
    """Two tokens of one step, judged by the reference's logits."""
    row = t.logits[step].double()
    best = row.topk(2).values
    margins = [float(best[0] - row[token]) for token in (expected, got)]
    bound = board.thresholds["tie_margin"].value * float(sizes(row[None]))
    texts = [decode([token]) for token in (expected, got)] if callable(decode) else ["", ""]
    return Mismatch(
        gate=gate,
        case=t.answer.name,
        step=step,
        expected=expected,
        got=got,
        expected_text=texts[0],
        got_text=texts[1],
        margin=float(best[0] - best[1]),
        expected_margin=margins[0],
        got_margin=margins[1],
        bound=bound,
        verdict="tie" if max(margins) <= bound else "failure",
    )


def check_verify(board: Board, t: CheckedTarget, table: Tensor, columns: Tensor | None) -> None:
    """Logits of verify passes, at every node that stands on the answer, against the reference's
    rows.

    Args:
        table: [P + A, H]: embeddings of the answer's tokens as the engine has them.
    """
    answer = t.answer
    first = answer.prompt_len - 1
    until = answer.prompt_len + answer.agreed
    errors: dict[int, float] = {}
    for p in _verify_passes(answer):
        rows = rows_of(p)
        given = dict(enumerate_logits(p, rows))
        for row, node in path_rows(p, rows, table[:until]).items():
            if node in given and row - first < len(t.logits):
                wanted = t.logits[row - first]
                wanted = wanted if columns is None else wanted[columns]
                errors[row] = float(row_errors(given[node][None], wanted[None]))
    if errors:
        ordered = sorted(errors)
        board.add_rows(
            "verify.logits",
            torch.tensor([errors[r] for r in ordered]),
            answer.name,
            "logits",
            ordered[0],
        )


def _verify_passes(answer: Answer) -> list[Pass]:
    passes = [p for p in answer.speculative_passes if p.graph == "target"]
    return [p for p in passes if rows_of(p).past >= answer.prompt_len]


def enumerate_logits(p: Pass, rows: Rows) -> list[tuple[int, Tensor]]:
    """(node, logits [V]) of a pass over a tree."""
    return [(logit.row - rows.start, logit.values) for logit in logits_of(p, rows)]


def parents_of(mask: Tensor) -> list[int]:
    """Each node's parent by a mask bool [T, T]: its last other visible one; -1 for the root."""
    parents = []
    for i, row in enumerate(mask.tolist()):
        seen = [j for j, visible in enumerate(row) if visible and j != i]
        parents.append(seen[-1] if seen else -1)
    return parents


def path_rows(p: Pass, rows: Rows, table: Tensor) -> dict[int, int]:
    """Sequence row -> node, for the nodes of a verify pass that hold the sequence's own tokens.

    Args:
        table: [m, H]: embeddings of the sequence's tokens; the root holds token ``past``.
    """
    embeds = rows.cut(p.inputs["inputs_embeds"])
    if rows.past >= len(table) or not torch.equal(embeds[0], table[rows.past]):
        return {}
    parents = parents_of(rows.mask)
    found, node, row = {rows.past: 0}, 0, rows.past
    while row + 1 < len(table):
        children = [i for i, parent in enumerate(parents) if parent == node]
        child = next((i for i in children if torch.equal(embeds[i], table[row + 1])), None)
        if child is None:
            break
        node, row = child, row + 1
        found[row] = node
    return found
