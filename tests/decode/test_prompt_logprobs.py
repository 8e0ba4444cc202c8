"""Log-probabilities of a prompt: those of a float32 forward, however the prompt is prefilled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tasks import Example

import trt_eagle3
from tests.decode.heldout import heldout, request_of
from tests.tiny import ROOT, TARGET, build_tiny
from trt_eagle3 import LLM, Generation, Logprob, RawPrompt, Request, SamplingParams, UserError
from trt_eagle3.decode.sampling import prompt_logprobs
from trt_eagle3.parity.checks.thresholds import THRESHOLDS

TOP = 4
WANTED = SamplingParams(prompt_logprobs=TOP)
TOLERANCE = THRESHOLDS["logprobs"].values["float32"]
"""In nats, as ``validate`` compares log-probabilities of float32 engines with PyTorch's."""
LONG = tuple(int(i) for i in np.random.default_rng(5).integers(1, 600, size=200))
"""Token ids of several chunks."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with trt_eagle3.load(build_tiny(tmp_path_factory.mktemp("engines"))) as llm:
        yield llm


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    found = transformers.Qwen3VLForConditionalGeneration.from_pretrained(
        TARGET, dtype=torch.float32
    )
    return found.eval()


def examples() -> list[Example]:
    """Text, one image, two images, frames."""
    kinds = {(len(e.images), len(e.frames) > 0): e for e in heldout()}
    assert len(kinds) == 4
    return list(kinds.values())


@torch.inference_mode()
def expected(
    model: torch.nn.Module, engine: LLM, example: Example
) -> tuple[list[int], torch.Tensor]:
    """The prompt's token ids, and the log-probabilities after each of them."""
    videos = [list(example.frames)] if example.frames else []
    inputs = engine.prepare(example.prompt, list(example.images), videos)
    vision = engine.bundle.spec.vision
    assert vision is not None
    ids = inputs.token_ids
    kind = (ids == vision.image_token_id).int() + 2 * (ids == vision.video_token_id).int()
    arguments = {"mm_token_type_ids": kind[None]}
    if example.frames:
        arguments |= {"pixel_values_videos": inputs.patches, "video_grid_thw": inputs.grid_thw}
    elif example.images:
        arguments |= {"pixel_values": inputs.patches, "image_grid_thw": inputs.grid_thw}
    return ids.tolist(), model(ids[None], **arguments).logits[0].double().log_softmax(1)


def check(found: Generation, ids: list[int], logprobs: torch.Tensor) -> None:
    """Compare every entry with ``logprobs`` [N, V] after each of ``ids``."""
    entries = found.prompt_logprobs
    assert entries is not None
    assert len(entries) == len(ids) == found.prompt_tokens
    assert entries[0] is None
    for token, row, entry in zip(ids[1:], logprobs[:-1], entries[1:], strict=True):
        assert entry is not None
        assert next(iter(entry)) == token
        assert TOP <= len(entry) <= TOP + 1
        for other, one in entry.items():
            assert abs(one.logprob - float(row[other])) < TOLERANCE
        best = sorted(entry.values(), key=lambda one: one.rank)[:TOP]
        assert [one.rank for one in best] == list(range(1, TOP + 1))
        values = torch.tensor([one.logprob for one in best])
        assert float((values - row.topk(TOP).values).abs().max()) < TOLERANCE
        near = (row - row[token]).abs() < TOLERANCE  # tokens that rounding may put on either side
        above = int((row > row[token]).sum())
        assert abs(entry[token].rank - 1 - above) <= int(near.sum())


def ask(engine: LLM, *, speculation: bool = True) -> list[Generation]:
    """Ask all examples at once, each also without log-probabilities."""
    requests = [
        request_of(example, sampling, speculation=speculation)
        for example in examples()
        for sampling in (WANTED, SamplingParams())
    ]
    answers = [engine.submit(request) for request in requests]
    found = [answer.finish() for answer in answers]
    assert all(other.prompt_logprobs is None for other in found[1::2])
    assert [one.token_ids for one in found[::2]] == [other.token_ids for other in found[1::2]]
    return found[::2]


@pytest.mark.parametrize("speculation", [False, True])
def test_prompt_logprobs_are_those_of_transformers_with_images_and_speculation(
    engine: LLM, model: torch.nn.Module, speculation: bool
) -> None:
    for found, example in zip(ask(engine, speculation=speculation), examples(), strict=True):
        check(found, *expected(model, engine, example))


def test_long_prompt_in_chunks_beside_others_has_them_too(
    engine: LLM, model: torch.nn.Module
) -> None:
    others = [request_of(example) for example in examples()]
    long = Request(RawPrompt(LONG), sampling=WANTED.updated(max_tokens=4))
    answers = [engine.submit(request) for request in (*others, long, long, *others)]
    found = [answer.finish() for answer in answers]
    ids = torch.tensor(LONG)
    with torch.inference_mode():
        logits = model(ids[None], mm_token_type_ids=torch.zeros_like(ids)[None]).logits[0]
    for one in found[len(others) : len(others) + 2]:
        check(one, list(LONG), logits.double().log_softmax(1))


def test_logprobs_of_another_row_are_caught(
    engine: LLM, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = prompt_logprobs._packed
    monkeypatch.setattr(
        prompt_logprobs, "_packed", lambda logits, *more: true(logits.roll(1, dims=0), *more)
    )
    example = examples()[0]
    with pytest.raises(AssertionError):
        check(ask(engine)[0], *expected(model, engine, example))


def test_chunk_at_another_row_is_caught(
    engine: LLM, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = prompt_logprobs.PromptLogprobs.put
    monkeypatch.setattr(
        prompt_logprobs.PromptLogprobs,
        "put",
        lambda self, start, rows: put(self, start - 1, rows[1:]),
    )
    with pytest.raises(AssertionError):
        check(ask(engine)[0], *expected(model, engine, examples()[0]))


def test_cached_prefix_is_computed_again_and_kept_for_others(engine: LLM) -> None:
    prompt = RawPrompt(LONG[::-1])
    first = engine.generate(prompt, WANTED, max_tokens=3)
    again = engine.generate(prompt, WANTED, max_tokens=3)
    without = engine.generate(prompt, max_tokens=3)
    assert (first.reused_tokens, again.reused_tokens) == (0, 0)
    assert without.reused_tokens > 128
    assert first.prompt_logprobs is not None
    assert again.prompt_logprobs is not None
    assert list(first.prompt_logprobs) == list(again.prompt_logprobs)
    assert first.token_ids == again.token_ids == without.token_ids


def test_prompt_with_its_answer_has_the_answer_s_logprobs_in_a_recurrent_model(
    tmp_path: Path,
) -> None:
    hybrid = ROOT / "examples/tiny_hybrid/target"
    with trt_eagle3.load(build_tiny(tmp_path, target=hybrid, draft=None)) as llm:
        answer = llm.generate(RawPrompt(LONG[:150]), max_tokens=8, logprobs=2, ignore_eos=True)
        whole = RawPrompt((*LONG[:150], *answer.token_ids))
        found = llm.generate(whole, prompt_logprobs=2, max_tokens=1).prompt_logprobs
    assert found is not None
    for token, entry in zip(answer.logprobs, found[150:], strict=True):
        assert entry is not None
        assert entry[token.token_id].logprob == pytest.approx(token.logprob, abs=TOLERANCE)


def test_preempted_sequence_keeps_them(tmp_path: Path, engine: LLM) -> None:
    alone = engine.generate(RawPrompt(LONG[:150]), WANTED, max_tokens=100, ignore_eos=True)
    limits = {"max_seq_len": 256, "max_kv_tokens": 352, "max_visual_tokens": 64}
    with trt_eagle3.load(build_tiny(tmp_path, limits=limits)) as llm:
        request = Request(
            RawPrompt(LONG[:150]), sampling=WANTED.updated(max_tokens=100, ignore_eos=True)
        )
        found = [answer.finish() for answer in [llm.submit(request), llm.submit(request)]]
        assert llm.metrics().preempted > 0
    assert alone.prompt_logprobs is not None
    for one in found:
        assert one.token_ids == alone.token_ids
        assert one.prompt_logprobs is not None
        assert list(one.prompt_logprobs) == list(alone.prompt_logprobs)


def test_first_of_several_answers_has_them(engine: LLM) -> None:
    first, second = engine.generate("What is 2 plus 3?", WANTED, n=2, max_tokens=2)
    assert first.prompt_logprobs is not None
    assert second.prompt_logprobs is None
    assert second.reused_tokens >= 0


def test_prompt_of_one_token_has_none(engine: LLM) -> None:
    found = engine.generate(RawPrompt(LONG[:1]), WANTED, max_tokens=2).prompt_logprobs
    assert found is not None
    assert list(found) == [None]


def test_without_likeliest_tokens_only_the_prompt_s_own_are_there(engine: LLM) -> None:
    found = engine.generate(RawPrompt(LONG[:5]), prompt_logprobs=0, max_tokens=1).prompt_logprobs
    assert found is not None
    assert [list(entry or ()) for entry in found] == [[], *([token] for token in LONG[1:5])]
    last = found[-1]
    assert last is not None
    assert isinstance(last[LONG[4]], Logprob)
    with pytest.raises(IndexError):
        found[5]


@pytest.mark.parametrize("value", [-1, 21, True, 1.5, "3"])
def test_bad_number_is_refused_in_one_line(value: object) -> None:
    with pytest.raises(UserError, match=r"^prompt_logprobs: expected a whole number from 0 to 20"):
        SamplingParams(prompt_logprobs=value)  # type: ignore[arg-type]
