"""Where bfloat16 speculation and plain decoding part, the float32 target finds both tokens
equally good.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tasks import Example, examples
from torch import Tensor

import trt_eagle3
from tests.decode.heldout import served
from tests.tiny import build_tiny
from trt_eagle3 import LLM, Request, SamplingParams
from trt_eagle3.decode.forward.runner import AttentionMetadata, TargetRunner, causal_mask
from trt_eagle3.decode.memory.state import layer_states
from trt_eagle3.engine.runtime.session import Session

PROMPTS = 40
CUDA = {"backend": "torch", "device": "cuda", "dtype": "bfloat16"}

# How far two logits of the float32 target may be apart where bfloat16 may rank them either way,
# relative to the row's largest. A bfloat16 logit carries the rounding of its own (2^-9 of it) and
# what the roundings of the decoder's layers (two additions to the residual stream in each of them,
# 2^-9 each, in random directions) make of it; two passes with other shapes draw them anew. Eight
# layers: sqrt(2 * 8 + 1) = 4.1 roundings, for each of two logits and two passes, and 2.5 standard
# deviations: 4.1 * 2 * 2.5 = 20, of 2^-9.
TIE = 20 * 2**-9


@pytest.fixture(scope="module")
def float32(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return trt_eagle3.load(build_tiny(tmp_path_factory.mktemp("float32")))


@pytest.fixture(scope="module")
def session(float32: LLM) -> Session:
    return float32.bundle.open_graph("target")


def options(example: Example) -> dict[str, Any]:
    videos = [list(example.frames)] if example.frames else []
    return {"images": list(example.images), "videos": videos}


def next_logits(engine: LLM, session: Session, example: Example, tokens: Sequence[int]) -> Tensor:
    """f32 [V]: what the float32 target says after the prompt and ``tokens``, in one pass over
    all of them.
    """
    page_size = engine.bundle.record.config.engine.page_size
    prompt = engine.bundle.preprocessor().prompt(engine.prepare(example.prompt, **options(example)))
    prompt = prompt.with_vision(engine.bundle.vision_encoder().encode(prompt))
    ids = torch.cat([prompt.token_ids, torch.tensor(tokens, dtype=torch.int64)])
    pages = torch.arange(1, -(-len(ids) // page_size) + 1, dtype=torch.int32)[None]
    slots = (pages.shape[1] + 1) * page_size
    states = layer_states(session.states, slots)
    embedding = engine.bundle.embedding
    target = TargetRunner(session, states, embedding, engine.bundle.spec.num_visual_levels)
    embeds = embedding.lookup(ids)
    prompt.put_visual(embeds, 0)
    visual_levels = embeds.new_zeros(target.num_visual_levels, 1, *embeds.shape)
    prompt.put_visual_levels(visual_levels[:, 0], 0)
    metadata = AttentionMetadata.single(
        0, pages, causal_mask(len(ids)), prompt.positions(0, len(ids))
    )
    logits, _ = target.forward(
        embeds[None], metadata, torch.tensor([[len(ids) - 1]]), visual_levels
    )
    return logits[0, 0]


def distance(logits: Tensor, tokens: Sequence[int]) -> float:
    """How far the worst of ``tokens`` is below the best logit, relative to the largest."""
    return float((logits.max() - logits[list(tokens)].min()) / logits.abs().max())


def gaps(float32: LLM, answers: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[float]:
    """Of each pair of answers to a held-out question that differ: how far the float32 target finds
    their first different tokens apart.
    """
    found = []
    for example, (one, other) in zip(questions(), answers, strict=True):
        if one != other:
            first = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
            logits = next_logits(float32, example, one[:first])
            found.append(distance(logits, (one[first], other[first])))
    return found


def questions() -> list[Example]:
    return list(examples("heldout", 11, PROMPTS))


def request(example: Example, *, speculation: bool) -> Request:
    sampling = SamplingParams(max_tokens=64)
    return Request(example.prompt, sampling=sampling, speculation=speculation, **options(example))


@pytest.mark.gpu
@pytest.mark.parametrize("concurrency", [1, 32])
def test_every_mismatch_of_bfloat16_speculation_is_a_tie(
    concurrency: int, float32: LLM, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    """Against plain decoding alone; so many at once."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    engine = trt_eagle3.load(build_tiny(tmp_path, engine=CUDA, limits={"max_batch_size": 32}))
    plain = [engine.submit(request(e, speculation=False)).finish() for e in questions()]
    asked = (request(e, speculation=True) for e in questions())
    speculative = [answer.generation for answer in served(engine, asked, concurrency)]
    engine.close()
    pairs = [(a.token_ids, b.token_ids) for a, b in zip(plain, speculative, strict=True)]
    found = gaps(float32, pairs)
    record_property("mismatches", len(found))
    print(
        f"{len(found)} of {PROMPTS} answers differ; gaps of the float32 target: "
        f"{[f'{gap:.4f}' for gap in found]}"
    )
    assert all(gap < TIE for gap in found), found


def test_the_float32_target_says_the_engine_s_own_tokens(float32: LLM, session: Session) -> None:
    for example in examples("heldout", 11, 6):
        tokens = float32.generate(
            example.prompt, speculation=False, max_tokens=8, **options(example)
        ).token_ids
        for count in (0, 1, len(tokens) - 1):
            assert (
                distance(next_logits(float32, session, example, tokens[:count]), [tokens[count]])
                == 0
            )


def test_a_wrong_token_is_no_tie(float32: LLM, session: Session) -> None:
    """Planted: the second-best token of a trained target, at each place of an answer, would have
    been noticed.
    """
    ties = places = 0
    for example in examples("heldout", 11, 4):
        tokens = float32.generate(
            example.prompt, speculation=False, max_tokens=6, **options(example)
        ).token_ids
        for count in range(len(tokens)):
            logits = next_logits(float32, session, example, tokens[:count])
            second = int(logits.topk(2).indices[1])
            places += 1
            ties += distance(logits, (tokens[count], second)) < TIE
    assert ties * 10 <= places, f"{ties} of {places}"
