"""Answers with options: grammars, penalties, bias, stop texts, seeds, and each pair of them.

First without speculation. Then with speculation, all at once, in two rounds: with prefixes reused
if the bundle does so, and the second time over fewer KV pages than needed, so that sequences are
preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from tokenizers import Tokenizer

from trt_eagle3.decode.request.answer import Answer
from trt_eagle3.decode.request.request import Generation, Request
from trt_eagle3.decode.sampling.grammar import Grammar
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.errors import EngineFailedError
from trt_eagle3.multimodal.tool_formats import ToolFormat
from trt_eagle3.multimodal.tool_formats.hermes import HERMES
from trt_eagle3.parity.record.answers import RecordedAnswer
from trt_eagle3.parity.record.engine import RecordingEngine
from trt_eagle3.parity.record.tool_calls import tool_sets

__all__ = ["CHOICES", "HOT_SEEDS", "PATTERN", "ROUNDS", "SCHEMA", "OptionAnswer", "OptionAnswers"]
__all__ += ["answer_options", "option_sets"]

PATTERN = "[a-f]{2,5}(, [a-f]{2,5}){1,3}"
CHOICES = ("yes", "no", "perhaps not")
SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"size": {"enum": ["S", "M"]}, "count": {"type": "integer", "maximum": 99}},
    "required": ["size", "count"],
    "additionalProperties": False,
}
ROUNDS = 3
MAX_TOKENS, NUM_CASES, _MIN_TOKENS = 16, 2, 8
HOT_SEEDS = tuple(f"temperature 5, seed {seed}" for seed in range(4))
"""Sets of options with a temperature so high that another seed draws other tokens, even where the
model is certain.
"""


def option_sets(
    end_ids: Sequence[int], tokenizer: Tokenizer, tool_format: ToolFormat = HERMES
) -> dict[str, SamplingParams]:
    """By name: each option, each pair of options, seeds alone, and required tool calls."""
    early: dict[str, Any] = {"logit_bias": {end_ids[0]: 50.0}} if end_ids else {}
    single: dict[str, dict[str, Any]] = {
        "grammar": {"grammar": Grammar.regex(PATTERN)},
        "penalties": {"frequency_penalty": 0.6, "presence_penalty": 0.4},
        "stop": {"stop": ["e"]},
        "seed": {"temperature": 0.8, "seed": 7},
        "min_tokens": {"min_tokens": _MIN_TOKENS, **early},
    }
    pairs = {f"{a} + {b}": single[a] | single[b] for a, b in combinations(single, 2)}
    grammars: dict[str, dict[str, Any]] = {
        "JSON Schema": {"grammar": Grammar.json_schema(SCHEMA)},
        "choice": {"grammar": Grammar.choice(CHOICES)},
    }
    hot = {name: {"temperature": 5.0, "seed": seed} for seed, name in enumerate(HOT_SEEDS)}
    sets = {**single, **pairs, **grammars, **hot}
    made = {name: SamplingParams(max_tokens=MAX_TOKENS, **given) for name, given in sets.items()}
    return {**made, **tool_sets(tokenizer, tool_format)}


@dataclass(frozen=True)
class OptionAnswer:
    """One prompt with one set of options.

    Attributes:
        case, options: their names.
        autoregressive: without speculation.
        speculative: with speculation, by round.
    """

    case: str
    options: str
    sampling: SamplingParams
    autoregressive: Generation
    speculative: tuple[Generation, ...]


@dataclass(frozen=True)
class OptionAnswers:
    """All answers with options.

    Attributes:
        logprobs: greedy answers of each case, with speculation if there is a draft.
        preempted, reused: as in ``BatchedAnswers``.
    """

    answers: Sequence[OptionAnswer]
    logprobs: Sequence[Generation]
    preempted: int
    reused: int


def answer_options(
    engine: RecordingEngine,
    answers: Sequence[RecordedAnswer],
    max_tokens: int,
    progress: Callable[[], object],
) -> OptionAnswers:
    """Answer some of the cases again, with every set of options."""
    engine.recording.only = "none"
    processor = engine.processor
    sets = option_sets(processor.end_token_ids, processor.tokenizer, processor.tool_format)
    some = _some(answers)
    asked = [(a, name, s) for a in some for name, s in sets.items()]
    engine.begin_service()
    autoregressive = _ask(engine, [(a, s) for a, _, s in asked], speculation=False)
    logprobs = _ask(
        engine,
        [(a, SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=5)) for a in answers],
        speculation=True,
    )
    progress()
    engine.begin_service()
    first = _ask(engine, [(a, s) for a, _, s in asked], speculation=True)
    progress()
    most = max(s.max_tokens for s in sets.values())
    engine.leave_pages(_few_pages(engine, some, most))
    second = _ask(engine, [(a, s) for a, _, s in asked], speculation=True)
    progress()
    now = engine.metrics()
    engine.recording.only = None
    every = zip(asked, autoregressive, first, second, strict=True)
    found = [OptionAnswer(a.name, name, s, x, (y, z)) for (a, name, s), x, y, z in every]
    return OptionAnswers(found, logprobs, now.preempted, now.reused_tokens)


def _some(answers: Sequence[RecordedAnswer]) -> list[RecordedAnswer]:
    """Return the first case with an image and the first without; if one kind, the first cases."""
    kinds = [bool(a.case.question.images) for a in answers]
    both = {kinds.index(kind) for kind in (True, False) if kind in kinds}
    others = (i for i in range(len(answers)) if i not in both)
    return [answers[i] for i in sorted([*sorted(both), *others][:NUM_CASES])]


def _few_pages(engine: RecordingEngine, answers: Sequence[RecordedAnswer], max_tokens: int) -> int:
    """Return the pages of the longest sequence, and two more."""
    longest = max(a.prompt_len for a in answers) + max_tokens + engine.num_tree_rows
    return -(-min(longest, engine.limits.max_seq_len) // engine.page_size) + 2


def _ask(
    engine: RecordingEngine,
    asked: Sequence[tuple[RecordedAnswer, SamplingParams]],
    *,
    speculation: bool,
) -> list[Generation]:
    """Submit all requests at once, up to ``max_waiting``."""
    found: list[Generation] = []
    wave = engine.limits.max_waiting
    for start in range(0, len(asked), wave):
        requests = []
        for answer, sampling in asked[start : start + wave]:
            q = answer.case.question
            requests.append(Request(q.prompt, q.images, q.videos, sampling, speculation))
        replies = engine.submit_together(requests)
        for reply in replies:
            reply.read_at_end()
        found += map(_finished, replies)
    return found


def _finished(reply: Answer) -> Generation:
    """Return the answer; if the engine failed, an answer without a finish reason."""
    with suppress(EngineFailedError):
        reply.finish()
    return reply.generation
