"""Checks of sampled tokens: their frequencies over many seeds, and the entropy of answers.

A token of probability p has the surprisal -log p. Over tokens drawn from their distributions, the
sum of surprisals has the sum of entropies as its mean, and a known variance. Greedy answers, and
drafted tokens that are accepted too often, have too little surprisal.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trt_eagle3.parity.checks.check_recorder import Measurements
from trt_eagle3.parity.checks.evidence import Evidence
from trt_eagle3.parity.checks.sampling import check_frequencies, reference_probs
from trt_eagle3.parity.record.answers import SampledAnswer
from trt_eagle3.parity.record.record import SAMPLING
from trt_eagle3.parity.record.trace import logits_of, rows_of
from trt_eagle3.parity.record.trees import node_logits, path_rows

__all__ = ["check_entropy", "check_tokens"]


def check_tokens(e: Evidence, m: Measurements) -> None:
    """Check frequencies of sampled tokens, and the entropy of the engine's sampled answers."""
    check_frequencies(e, m)
    check_entropy(e, m)


def check_entropy(e: Evidence, m: Measurements) -> None:
    """Compute one p-value over all sampled answers; 0 if an impossible token was drawn."""
    found = [
        _surprisal(row, token) for answer in e.record.sampled for row, token in _drawn(e, answer)
    ]
    if not found:
        return
    excess, variance = (sum(values) for values in zip(*found, strict=True))
    z = excess / max(variance, 1e-12) ** 0.5 if excess else 0.0
    value = float(torch.special.erfc(torch.tensor(abs(z) / 2**0.5, dtype=torch.float64)))
    detail = (
        f"{len(found)} tokens have {excess:+.1f} nats over the entropy of their distributions, "
        f"{z:+.1f} standard deviations"
    )
    m.add(value, "", "the engine's own answers", None, detail, compared=len(found))


def _surprisal(row: Tensor, token: int) -> tuple[float, float]:
    """Return the surprisal of ``token`` minus the entropy of its row, and its variance."""
    probs = reference_probs(row, SAMPLING)
    surprisal = -probs.log()
    entropy = float((probs * surprisal).nan_to_num().sum())
    variance = float((probs * surprisal.square()).nan_to_num().sum()) - entropy**2
    # coarse dtypes have many equal logits, and a filter may keep any of those at its edge
    return float(surprisal[row == row[token]].min()) - entropy, variance


def _drawn(e: Evidence, answer: SampledAnswer) -> Iterator[tuple[Tensor, int]]:
    """Yield logits [V] and the drawn token, for every token whose logits were recorded."""
    rows, first = _logits_by_row(e, answer), len(answer.prompt_ids) - 1
    for step, token in enumerate(answer.tokens):
        if first + step in rows:
            yield rows[first + step], token


def _logits_by_row(e: Evidence, answer: SampledAnswer) -> dict[int, Tensor]:
    """Return the logits [V] of every row whose next token is in the answer."""
    num_prompt = len(answer.prompt_ids)
    table = e.embed(torch.cat([answer.prompt_ids, torch.tensor(answer.tokens)]))
    found: dict[int, Tensor] = {}
    for forward in answer.forwards:
        rows = rows_of(forward)
        if rows.past < num_prompt and rows.start < num_prompt:
            last = [logit for logit in logits_of(forward) if logit.row == num_prompt - 1]
            found |= {logit.row: logit.values for logit in last}
        else:
            given = node_logits(forward, rows)
            nodes = path_rows(forward, rows, table).items()
            found |= {row: given[node] for row, node in nodes if node in given}
    return found
