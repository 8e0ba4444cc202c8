"""Options where the next run of a graph overwrites its outputs, as on CUDA: log-probabilities of
first tokens, and answers with grammars, penalties and biases, are the same in batches and alone.
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
from trt_eagle3.decode.step import prefill
from trt_eagle3.decode.step.prefill import Chunk, FirstTokens

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
    def of(i: int) -> dict[str, Any]:
        if kind == "grammar":
            return {"grammar": GRAMMARS[i % 4]}
        if kind == "penalties":
            bias = {"logit_bias": {30 + i: 2.0}, "frequency_penalty": 0.1 * i}
            return {**bias, "presence_penalty": 0.2, "min_tokens": i}
        logprobs, grammar = None if i % 5 else 2, GRAMMARS[i % 4] if i % 3 else None
        mixed = {"frequency_penalty": 0.4 * (i % 2), "min_tokens": i}
        return {**mixed, "logprobs": logprobs, "grammar": grammar}

    return [SamplingParams(max_tokens=24, **of(i)) for i in range(count)]


@pytest.fixture(scope="module", params=["overwriting", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine of each mode, made at its first use."""
    made: dict[str, LLM] = {}
    cuda = request.param == "cuda"
    if cuda and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    backend: dict[str, Any] = {"prefill_chunk": 64}  # two prompts: more are prefilled at once
    if cuda:  # one prompt: alone it is one captured graph, and logits of several are their own
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


def batched(engine: LLM, samplings: Sequence[SamplingParams], **changes: Any) -> list[Answer]:
    """Answers to the first questions that are computed in batches."""
    pairs = zip(QUESTIONS, samplings, strict=False)
    requests = [Request(q, sampling=s, **changes) for q, s in pairs]
    return list(engine._started().submit_together(requests, engine))


def first_logprobs(engine: LLM, *, alone: bool) -> list[float]:
    """Of the first token of every question and the likeliest others."""
    if alone:
        found = [engine.generate(q, sampling=FIRST).logprobs for q in QUESTIONS]
    else:
        found = [a.finish().logprobs for a in batched(engine, [FIRST] * len(QUESTIONS))]
    return [value for (first,) in found for value in (first.logprob, *(v for _, v in first.top))]


def test_logprobs_of_first_tokens_in_batches_are_those_of_each_alone(engine: Any) -> None:
    llm = engine("chain")
    alone = first_logprobs(llm, alone=True)
    for _ in range(3):  # on CUDA shapes that come again are captured
        assert first_logprobs(llm, alone=False) == pytest.approx(alone, abs=1e-4)


def test_logits_that_the_next_prompt_overwrites_are_caught(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Careless(FirstTokens):
        def __init__(self, chunks: Sequence[Chunk], logits: Tensor, *rest: Any) -> None:
            super().__init__(chunks, logits, *rest)
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
    llm, samplings = engine(mode), options(kind, 10)
    pairs = zip(QUESTIONS, samplings, strict=False)
    alone = [llm.generate(q, sampling=s, speculation=False) for q, s in pairs]
    for speculation in (True, False):
        found = [a.finish() for a in batched(llm, samplings, speculation=speculation)]
        assert [a.token_ids for a in found] == [a.token_ids for a in alone]
        for ours, theirs in zip(found, alone, strict=True):
            values = [x.logprob for x in ours.logprobs]
            assert values == pytest.approx([x.logprob for x in theirs.logprobs], abs=1e-3)
