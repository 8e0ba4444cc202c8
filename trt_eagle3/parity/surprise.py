"""Sampled answers of the whole engine: are they as surprising as their distribution says?

A token of probability p surprises by -log p; over tokens drawn from their distributions the sum of
surprises has the sum of entropies as its mean and a known variance. Greedy answers surprise too
little, as do drafted tokens that are accepted too often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trt_eagle3.decode.sampling_params import SamplingParams
from trt_eagle3.parity.answers import Sampled
from trt_eagle3.parity.board import Board
from trt_eagle3.parity.sampling_check import reference_probs
from trt_eagle3.parity.token_check import enumerate_logits, path_rows
from trt_eagle3.parity.trace import logits_of, rows_of

__all__ = ["NUM_SAMPLED", "SETTING", "check_surprise"]

# warm, so that few tokens tell chance from certainty
SETTING = SamplingParams(temperature=2.5, top_p=0.95)
NUM_SAMPLED = 3
"""Cases that are answered by chance."""


def check_surprise(
    board: Board, answers: Sequence[Sampled], embed: Callable[[Tensor], Tensor]
) -> None:
    """One p-value over all answers; a token that cannot be has none.

    Args:
        embed: token ids to embeddings as the engine has them, by which a tree's nodes are known.
    """
    excess = variance = 0.0
    count = 0
    for answer in answers:
        rows = _logits_by_row(answer, embed)
        first = len(answer.prompt_ids) - 1
        for step, token in enumerate(answer.tokens):
            if first + step not in rows:
                continue
            row = rows[first + step]
            probs = reference_probs(row, SETTING)
            surprise = -probs.log()
            entropy = float((probs * surprise).nan_to_num().sum())
            # coarse types have many equal logits, and of those at its edge a filter may keep any
            excess += float(surprise[row == row[token]].min()) - entropy
            variance += float((probs * surprise.square()).nan_to_num().sum()) - entropy**2
            count += 1
    if not count:
        return
    z = excess / max(variance, 1e-12) ** 0.5 if excess else 0.0
    value = float(torch.special.erfc(torch.tensor(abs(z) / 2**0.5, dtype=torch.float64)))
    detail = (
        f"{count} tokens surprise by {excess:+.1f} nats over what is expected, {z:+.1f} standard "
        "deviations"
    )
    board.add("sampling.tokens", value, "", "the engine's own answers", None, detail)


def _logits_by_row(answer: Sampled, embed: Callable[[Tensor], Tensor]) -> dict[int, Tensor]:
    """Logits [V] of every row whose next token the answer has."""
    num_prompt = len(answer.prompt_ids)
    table = embed(torch.cat([answer.prompt_ids, torch.tensor(answer.tokens)]))
    found: dict[int, Tensor] = {}
    for p in answer.passes:
        rows = rows_of(p)
        if rows.past < num_prompt and rows.start < num_prompt:
            found |= {
                logit.row: logit.values for logit in logits_of(p) if logit.row == num_prompt - 1
            }
        else:
            given = dict(enumerate_logits(p, rows))
            found |= {
                row: given[node] for row, node in path_rows(p, rows, table).items() if node in given
            }
    return found
