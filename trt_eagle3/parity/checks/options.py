"""Checks of options: grammars, penalties, bias, stop texts, seeds and log-probabilities, with
speculation as without.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence

import torch

from trt_eagle3.decode.request import Generation
from trt_eagle3.parity.checks.check_recorder import Measurements
from trt_eagle3.parity.checks.evidence import Evidence
from trt_eagle3.parity.checks.mismatch import first_difference
from trt_eagle3.parity.record.options import (
    CHOICES,
    PATTERN,
    SCHEMA,
    OptionAnswer,
    OptionAnswers,
)

__all__ = ["check_grammar", "check_logprobs", "check_tokens"]


def _options(e: Evidence) -> OptionAnswers:
    assert e.record.options is not None, "options were not recorded"
    return e.record.options


def check_tokens(e: Evidence, m: Measurements) -> None:
    """Tokens with every set of options: with speculation as without; what is drawn by chance, with
    reused prefixes and preemption as before.
    """
    found = _options(e)
    for answer in found.answers:
        first, *others = answer.speculative
        sides = [first, *others] if answer.sampling.greedy else others
        base = answer.autoregressive if answer.sampling.greedy else first
        for side in sides:
            _compare(m, answer, base, side)
    m.count(
        answers_compared=len(found.answers),
        preempted=found.preempted,
        prompt_rows_reused=found.reused,
    )


def _compare(m: Measurements, answer: OptionAnswer, base: Generation, got: Generation) -> None:
    """Add 1 where tokens, text or the end differ, and no tie explains it."""
    same = first_difference(base.token_ids, got.token_ids)
    equal = base.token_ids == got.token_ids and base.text == got.text
    detail = "" if equal else f"first at token {same} of {len(base.token_ids)}"
    tie = not equal and _is_tie(answer, base.token_ids, got.token_ids, same, m.tie_margin)
    m.count(ties=int(tie))
    m.add(int(not equal and not tie), answer.case, answer.options, None, detail)


def _is_tie(
    answer: OptionAnswer, base: Sequence[int], got: Sequence[int], step: int, margin: float
) -> bool:
    """Whether the two tokens of ``step`` are as good as equal, penalties included; ``margin``: of
    the largest log-probability there.
    """
    logprobs = answer.autoregressive.logprobs
    if not answer.sampling.greedy or step >= min(len(base), len(got), len(logprobs)):
        return False
    found = dict(logprobs[step].top) | {base[step]: logprobs[step].logprob}
    if got[step] not in found:
        return False
    times, s = Counter(base[:step]), answer.sampling
    chosen = [
        found[t] - s.frequency_penalty * times[t] - s.presence_penalty * (t in times)
        for t in (base[step], got[step])
    ]
    return abs(chosen[0] - chosen[1]) <= margin * max(map(abs, found.values()))


def check_grammar(e: Evidence, m: Measurements) -> None:
    """Every answer with a grammar, read by Python's own readers: it is what was asked for, or its
    beginning where it was cut.
    """
    for answer in _options(e).answers:
        if answer.sampling.grammar is None or answer.sampling.grammar.kind == "tags":
            continue
        for found in (answer.autoregressive, *answer.speculative):
            cut = found.finish_reason == "length" or bool(answer.sampling.stop)
            good = _begins(answer, found.text) if cut else _obeys(answer, found.text)
            good = good and found.finish_reason is not None
            m.count(finished=int(not cut))
            m.add(int(not good), answer.case, answer.options, None, f"{found.text!r:.60}")


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
    """Whether ``text`` has no sign that could not stand in such an answer."""
    if answer.options == "choice":
        return any(choice.startswith(text) for choice in CHOICES)
    signs = '[{}": \\t\\n\\r,a-zSM0-9-]*' if answer.options == "JSON Schema" else "[a-f, ]*"
    return re.fullmatch(signs, text) is not None


def check_logprobs(e: Evidence, m: Measurements) -> None:
    """Log-probabilities of emitted tokens and of the five likeliest, against the reference's, as
    far as the tokens are the answer's.
    """
    for expected, found in zip(e.expected, _options(e).logprobs, strict=True):
        own = expected.answer.autoregressive
        same = min(first_difference(own, found.token_ids), len(expected.logits))
        raw = expected.logits[:same].double().log_softmax(dim=-1)
        ids = torch.tensor(
            [[x.token_id, *(token for token, _ in x.top)] for x in found.logprobs[:same]]
        )
        ours = torch.tensor(
            [[x.logprob, *(value for _, value in x.top)] for x in found.logprobs[:same]],
            dtype=torch.float64,
        )
        if same:
            errors = (ours - raw.gather(1, ids.to(raw.device)).cpu()).abs().amax(dim=1)
            worst = int(errors.argmax())
            row = expected.answer.prompt_len + worst
            m.add(float(errors[worst]), expected.answer.name, "logprobs", row)
