"""Choices: the values by which the reference chooses the next token of an answer with options.

Computed only where two answers of the engine differ: the reference runs over those tokens alone, in
one batch. Shapes: V vocab, W = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trt_eagle3.decode.sampling.grammar_masks import fill_next
from trt_eagle3.decode.sampling.logits_process import unpacked_bits
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.parity.checks.evidence import Evidence
from trt_eagle3.parity.checks.mismatch import Choice
from trt_eagle3.parity.checks.sampling import filtered_probs, reference_scores
from trt_eagle3.parity.reference.expected import expect_tokens
from trt_eagle3.parity.reference.target_rows import run_layers

__all__ = ["ChoiceQuery", "choices"]


@dataclass(frozen=True)
class ChoiceQuery:
    """The token after ``tokens`` of an answer to prompt ``case``."""

    case: str
    sampling: SamplingParams
    tokens: Sequence[int]


def choices(e: Evidence, asked: Sequence[ChoiceQuery]) -> list[Choice]:
    """Return the values by which the reference chooses each token of ``asked``."""
    by_name = {x.answer.name: x for x in e.expected}
    # the last row of ``tokens`` predicts the requested token
    wanted = [expect_tokens(e.reference, by_name[a.case], (*a.tokens, 0)) for a in asked]
    if wanted:
        run_layers(e.reference, wanted, None, lambda: None)
    prompts = [x.answer.inputs.token_ids for x in wanted]
    rows = [x.logits[-1] for x in wanted]
    return [_choice(e, *given) for given in zip(asked, prompts, rows, strict=True)]


def _choice(e: Evidence, asked: ChoiceQuery, prompt: Tensor, logits: Tensor) -> Choice:
    sampling, tokens = asked.sampling, list(asked.tokens)
    seen = torch.cat([prompt, torch.tensor(tokens, dtype=torch.int64)])
    scores = reference_scores(logits, sampling, seen, tokens)
    scores = scores.masked_fill(~_allowed(e, sampling, tokens, len(logits)), -torch.inf)
    probs = None if sampling.greedy else filtered_probs(scores, sampling)
    return Choice(logits, scores, probs)


def _allowed(e: Evidence, sampling: SamplingParams, tokens: Sequence[int], vocab: int) -> Tensor:
    """bool [V]: tokens the grammar allows; without one, no end token before ``min_tokens``."""
    ends = {*sampling.stop_token_ids, *e.engine.processor.end_token_ids}
    if sampling.grammar is None:
        allowed = torch.ones(vocab, dtype=torch.bool)
        allowed[list(ends)] = len(tokens) >= sampling.min_tokens
        return allowed
    state = e.engine.bundle.grammars.state(
        sampling.grammar, min_tokens=sampling.min_tokens, ignore_eos=sampling.ignore_eos
    )
    state.advance(tokens)
    words = np.empty(-(-vocab // 32), dtype=np.int32)
    fill_next(state, words)
    return unpacked_bits(torch.from_numpy(words), vocab)
