"""Options where a graph's outputs are its own memory, which the next run of the same shapes
overwrites, as on CUDA: log-probabilities of first tokens, and answers with grammars, penalties and
biases in batches as alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.decode.overwriting import overwriting_llm
from tests.decode.test_batches import MODES
from tests.tiny import build_tiny
from trt_eagle3 import LLM, Answer, Grammar, Request, SamplingParams, load
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.step import prefill
from trt_eagle3.decode.step.prefill import FirstTokens

SCHEMA = {
    "type": "object",
    "properties": {"c": {"enum": ["red", "green"]}, "n": {"enum": [1, 23]}},
    "required": ["c", "n"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar.json_schema(SCHEMA),
    Grammar.regex("[a-c]{3,8}"),
    Grammar.choice(["yes", "no"]),
    Grammar.json_object(),
)
LIMITS = {"max_seq_len": 256, "max_visual_tokens": 64, "max_batch_size": 16, "prefix_cache": False}
FIRST = SamplingParams(logprobs=2, max_tokens=1)
QUESTIONS = [f"What is {i} plus 4{i}?" for i in range(10, 26)]  # of one length


def options(kind: str, count: int) -> list[SamplingParams]:
    def of(i: int) -> SamplingParams:
        grammar = GRAMMARS[i % 4]
        if kind == "grammar":
            return SamplingParams(max_tokens=24, grammar=grammar)
        if kind == "penalties":
            bias = {30 + i: 2.0}
            penalty = SamplingParams(max_tokens=24, frequency_penalty=0.1 * i, logit_bias=bias)
            return penalty.updated(presence_penalty=0.2, min_tokens=i)
        mixed = SamplingParams(max_tokens=24, frequency_penalty=0.4 * (i % 2), min_tokens=i)
        some = mixed.updated(logprobs=2 if i % 5 == 0 else None)
        return some.updated(grammar=grammar) if i % 3 else some

    return [of(i) for i in range(count)]


@pytest.fixture(
    scope="module",
    params=["overwriting", pytest.param("cuda", marks=pytest.mark.gpu)],
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By mode, an engine; made where it is asked for."""
    made: dict[str, LLM] = {}
    cuda = request.param == "cuda"
    if cuda and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    backend: dict[str, Any] = {"prefill_chunk": 64}  # of two prompts: others follow at once
    if cuda:  # of one: alone it is one captured graph, and logits of several are their own
        backend = {"prefill_chunk": 32, "backend": "torch", "device": "cuda", "dtype": "float32"}

    def of(mode: str) -> LLM:
        if mode not in made:
            folder = tmp_path_factory.mktemp(mode)
            speculation = {**MODES[mode], "adaptive": False}
            bundle = build_tiny(folder, limits=LIMITS, speculation=speculation, engine=backend)
            made[mode] = load(bundle) if cuda else overwriting_llm(bundle)
        return made[mode]

    yield of
    for llm in made.values():
        llm.close()


def together(engine: LLM, asked: Sequence[SamplingParams], **changes: Any) -> list[Answer]:
    """Answers that are computed in batches."""
    requests = [Request(q, sampling=s, **changes) for q, s in zip(QUESTIONS, asked, strict=False)]
    core = engine._started()
    return list(core.submit_together(requests, engine))


def first_logprobs(engine: LLM, *, alone: bool) -> list[float]:
    """Of the first token of every question and the likeliest others."""
    asked = [FIRST] * len(QUESTIONS)
    if alone:
        found = [
            engine.generate(q, sampling=s).logprobs for q, s in zip(QUESTIONS, asked, strict=True)
        ]
    else:
        found = [answer.finish().logprobs for answer in together(engine, asked)]
    return [value for (first,) in found for value in (first.logprob, *(v for _, v in first.top))]


def test_logprobs_of_first_tokens_in_batches_are_those_of_each_alone(engine: Any) -> None:
    llm = engine("chain")
    alone = first_logprobs(llm, alone=True)
    for _ in range(3):  # on CUDA shapes that come again are captured
        assert first_logprobs(llm, alone=False) == pytest.approx(alone, abs=1e-4)


def test_logits_that_the_next_prompt_overwrites_are_noticed(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Careless(FirstTokens):
        def __init__(
            self, chunks: Sequence[tuple[SequenceState, int]], logits: Sequence[Tensor]
        ) -> None:
            super().__init__(chunks, logits)
            self._logits = {s: x for (s, _), x in zip(chunks, logits, strict=True)}

    llm = engine("chain")
    alone = first_logprobs(llm, alone=True)
    monkeypatch.setattr(prefill, "FirstTokens", Careless)
    for _ in range(3):
        wrong = first_logprobs(llm, alone=False)
    assert wrong != pytest.approx(alone, abs=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["cuda"], indirect=True)
@pytest.mark.parametrize("kind", ["grammar", "mixed", "penalties"])
@pytest.mark.parametrize("mode", MODES)
def test_answers_with_options_in_batches_are_those_of_each_alone(
    engine: Any, mode: str, kind: str
) -> None:
    llm, asked = engine(mode), options(kind, 10)
    alone = [
        llm.generate(q, sampling=s, speculation=False)
        for q, s in zip(QUESTIONS, asked, strict=False)
    ]
    for speculation in (True, False):
        found = [a.finish() for a in together(llm, asked, speculation=speculation)]
        assert [a.token_ids for a in found] == [a.token_ids for a in alone]
        for ours, theirs in zip(found, alone, strict=True):
            values = [x.logprob for x in ours.logprobs]
            assert values == pytest.approx([x.logprob for x in theirs.logprobs], abs=1e-3)
