"""Checks of options: answers with speculation must equal answers without speculation.

Options: grammars, penalties, bias, stop texts, seeds and log-probabilities.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.decode.request.request import Generation
from trt_eagle3.parity.checks.check_recorder import Measurements
from trt_eagle3.parity.checks.choices import ChoiceQuery, choices
from trt_eagle3.parity.checks.evidence import Evidence
from trt_eagle3.parity.checks.mismatch import Choice, Decode, find_mismatch, first_difference
from trt_eagle3.parity.checks.own_rounding import own_logprobs
from trt_eagle3.parity.metrics import RowErrors
from trt_eagle3.parity.record.options import (
    CHOICES,
    HOT_SEEDS,
    PATTERN,
    SCHEMA,
    OptionAnswer,
    OptionAnswers,
)
from trt_eagle3.parity.reference.expected import ExpectedAnswer

__all__ = ["check_grammar", "check_logprobs", "check_seeds", "check_tokens"]


def _options(e: Evidence) -> OptionAnswers:
    assert e.record.options is not None, "options were not recorded"
    return e.record.options


def check_tokens(e: Evidence, m: Measurements) -> None:
    """Compare tokens with every set of options, with and without speculation.

    Sampled tokens are compared with those of another run with reused prefixes and preemption.
    """
    found = _options(e)
    pairs = [_Pair(answer, *sides) for answer in found.answers for sides in _sides(answer)]
    parted = [pair for pair in pairs if pair.parted]
    asked = [
        ChoiceQuery(p.answer.case, p.answer.sampling, p.base.token_ids[: p.same]) for p in parted
    ]
    by_pair = dict(zip(map(id, parted), choices(e, asked), strict=True))
    for pair in pairs:
        _add_pair(m, pair, by_pair.get(id(pair)), e.decode)
    m.count(
        answers_compared=len(found.answers),
        preempted=found.preempted,
        prompt_rows_reused=found.reused,
    )


def _sides(answer: OptionAnswer) -> list[tuple[Generation, Generation]]:
    """Return pairs of answers that must be the same."""
    first, *others = answer.speculative
    if answer.sampling.greedy:
        return [(answer.autoregressive, side) for side in (first, *others)]
    return [(first, side) for side in others]


@dataclass(frozen=True)
class _Pair:
    """Two answers that must be the same."""

    answer: OptionAnswer
    base: Generation
    got: Generation

    @property
    def same(self) -> int:
        """Number of equal tokens at the start."""
        return first_difference(self.base.token_ids, self.got.token_ids)

    @property
    def equal(self) -> bool:
        return self.base.token_ids == self.got.token_ids and self.base.text == self.got.text

    @property
    def parted(self) -> bool:
        """Whether both continue with a token, and the tokens differ."""
        return self.same < min(len(self.base.token_ids), len(self.got.token_ids))


def _add_pair(m: Measurements, pair: _Pair, choice: Choice | None, decode: Decode) -> None:
    """Add 1 if tokens, text or the end differ and no tie explains it."""
    answer, step, failed = pair.answer, pair.same, not pair.equal
    if choice is not None:
        tokens = pair.base.token_ids[step], pair.got.token_ids[step]
        mismatch = find_mismatch(m, answer.case, step, choice, tokens, decode)
        m.mismatches.append(mismatch)
        failed = mismatch.kind == "failure"
        m.count(ties=int(not failed))
    detail = f"first at token {step} of {len(pair.base.token_ids)}" if failed else ""
    compared = step + pair.parted
    m.add(int(failed), answer.case, answer.options, None, detail, compared=compared)


def check_seeds(e: Evidence, m: Measurements) -> None:
    """Check that a seed draws the same tokens again, and that seeds draw different tokens.

    Measures the share of draws that differ. After two answers differ, later draws follow other
    tokens, so only the draw at the first difference counts. Below float32, ``check_tokens`` accepts
    any token that is likely enough, so it does not detect ignored seeds.
    """
    hot = [answer for answer in _options(e).answers if answer.options in HOT_SEEDS]
    pairs = [_Pair(answer, *sides) for answer in hot for sides in _sides(answer)]
    parted = sum(pair.parted for pair in pairs)
    drawn = parted + sum(pair.same for pair in pairs)
    if not drawn:
        return
    m.add(parted / drawn, "", "once more", None, f"{parted} of {drawn} draws", compared=drawn)
    m.count(draws_compared=drawn)
    for case in {answer.case for answer in hot}:
        answers = [answer.speculative[0].token_ids for answer in hot if answer.case == case]
        others, alike = len(answers) - 1, len(set(answers)) == 1
        value, detail = float(others > 0 and alike), f"{len(answers)} seeds"
        m.add(value, case, "other seeds", None, detail, compared=others)


def check_grammar(e: Evidence, m: Measurements) -> None:
    """Parse every answer with a grammar with Python's own parsers.

    A finished answer must match the grammar. An answer that was cut must be a beginning of one.
    """
    for answer in _options(e).answers:
        if answer.sampling.grammar is None or answer.sampling.grammar.kind == "tags":
            continue
        for found in (answer.autoregressive, *answer.speculative):
            cut = found.finish_reason == "length" or bool(answer.sampling.stop)
            good = _begins(answer, found.text) if cut else _obeys(answer, found.text)
            good = good and found.finish_reason is not None
            m.count(finished=int(not cut))
            detail, compared = f"{found.text!r:.60}", len(found.token_ids)
            m.add(int(not good), answer.case, answer.options, None, detail, compared=compared)


def _obeys(answer: OptionAnswer, text: str) -> bool:
    if answer.options == "choice":
        return text in CHOICES
    if answer.options != "JSON Schema":
        return re.fullmatch(PATTERN, text) is not None
    try:
        value = json.loads(text)
    except ValueError:
        return False
    sizes = SCHEMA["properties"]["size"]["enum"]
    return (
        isinstance(value, dict)
        and value.keys() == {"size", "count"}
        and value["size"] in sizes
        and isinstance(value["count"], int)
        and value["count"] <= 99
    )


def _begins(answer: OptionAnswer, text: str) -> bool:
    """Return whether ``text`` contains only characters that such an answer may contain."""
    if answer.options == "choice":
        return any(choice.startswith(text) for choice in CHOICES)
    signs = '[{}": \\t\\n\\r,a-zSM0-9-]*' if answer.options == "JSON Schema" else "[a-f, ]*"
    return re.fullmatch(signs, text) is not None


def check_logprobs(e: Evidence, m: Measurements) -> None:
    """Compare log-probabilities of emitted tokens and of the five likeliest with the reference's.

    Compared as far as the tokens equal those of the answer.
    """
    expected = [x.verified for x in e.expected]
    given = [_logprobs(*pair) for pair in zip(expected, _options(e).logprobs, strict=True)]
    for x, logprobs in zip(expected, given, strict=True):
        if len(logprobs.values):
            first = x.answer.prompt_len
            errors = logprobs.errors(x.logits[: len(logprobs.values)])
            opened = x.open_at(range(first - 1, first - 1 + len(errors)))
            compared = RowErrors(x.answer.name, "logprobs", errors, first, opened)
            m.add_rows(compared, own=own_logprobs(e))


@dataclass(frozen=True)
class _Logprobs:
    """The first tokens of an answer: ids int64 [a, 6], and their log-probabilities float64."""

    ids: Tensor
    values: Tensor

    def errors(self, logits: Tensor) -> Tensor:
        """float64 [a]: the largest difference from those of ``logits`` [a, V], in nats."""
        raw = logits.double().cpu().log_softmax(dim=-1)
        return (self.values - raw.gather(1, self.ids)).abs().amax(dim=1)


def _logprobs(expected: ExpectedAnswer, found: Generation) -> _Logprobs:
    own = expected.answer.autoregressive
    same = min(first_difference(own, found.token_ids), len(expected.logits))
    tops = [((x.token_id, x.logprob), *x.top) for x in found.logprobs[:same]]
    values = torch.tensor([[y for _, y in top] for top in tops], dtype=torch.float64)
    return _Logprobs(torch.tensor([[token for token, _ in top] for top in tops]), values)
