"""Images that come again: found instead of encoded, and answered with the same tokens."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.tiny import build_tiny
from trt_eagle3 import LLM, MediaCacheSizes
from trt_eagle3.decode.core import EngineCore
from trt_eagle3.decode.request.encoder_cache import EncoderCache
from trt_eagle3.decode.request.prompt import Prompt, Vision
from trt_eagle3.decode.request.request import Request
from trt_eagle3.decode.request.vision_encoder import VisionRunner
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.multimodal.media_cache import NO_MEDIA_CACHE
from trt_eagle3.parity.record.workload import draw_image

EIGHT = SamplingParams(max_tokens=8, ignore_eos=True)
QUESTIONS = ("What is this?", "And the colours?")


def encoded(seed: int, size: tuple[int, int] = (160, 128)) -> bytes:
    out = io.BytesIO()
    draw_image(seed, size).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("engines"))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The patches of each run of the vision tower."""
    found: list[int] = []
    forward = VisionRunner.forward

    def counted(self: VisionRunner, patches: Tensor, rows: Any) -> Any:
        found.append(len(patches))
        return forward(self, patches, rows)

    monkeypatch.setattr(VisionRunner, "forward", counted)
    return found


def opened(bundle: Path, sizes: MediaCacheSizes) -> LLM:
    return LLM(bundle, media_cache=sizes, prefix_cache=False)


def vision(value: float, rows: int = 4) -> Vision:
    return Vision(torch.full((rows, 2), value), torch.full((1, rows, 2), -value))


def test_image_that_comes_again_is_neither_decoded_nor_encoded(
    bundle: Path, runs: list[int]
) -> None:
    with opened(bundle, MediaCacheSizes()) as llm:
        for question in QUESTIONS:
            llm.generate(question, EIGHT, images=[encoded(1), encoded(2)])
        now = llm.metrics()
    assert len(runs) == 2
    assert (now.embedding_hits, now.embedding_host_hits, now.embedding_misses) == (2, 0, 2)
    assert (now.image_hits, now.image_misses) == (2, 2)
    assert now.embedding_bytes > 0
    assert now.image_bytes > 0


@pytest.mark.parametrize(
    "sizes", [MediaCacheSizes(), MediaCacheSizes(1, 1 << 20, 1 << 20), MediaCacheSizes(0, 0, 1)]
)
def test_answers_are_the_same_with_and_without_the_cache(
    sizes: MediaCacheSizes, bundle: Path
) -> None:
    pictures = [[encoded(1)], [encoded(2), encoded(1)], [encoded(1), encoded(3, (96, 64))]]
    asked = [(question, images) for images in pictures for question in QUESTIONS]
    options = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=2)
    found = []
    for kept in (NO_MEDIA_CACHE, sizes):
        with opened(bundle, kept) as llm:
            found.append([llm.generate(q, options, images=images) for q, images in asked])
    for without, with_cache in zip(*found, strict=True):
        assert without.token_ids == with_cache.token_ids
        assert without.logprobs == with_cache.logprobs


@pytest.mark.gpu
def test_answers_on_cuda_are_the_same_with_and_without_the_cache(tmp_path: Path) -> None:
    """Without it, the tower runs eagerly, and later from a captured graph; with it, embeddings go
    to page-locked memory and back.
    """
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    cuda = {"backend": "torch", "device": "cuda", "dtype": "bfloat16"}
    path = build_tiny(tmp_path, engine=cuda)
    pictures = [[encoded(1)], [encoded(2), encoded(1)], [encoded(3, (96, 64))], [encoded(1)]]
    options = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=2)
    found = []
    for sizes in (NO_MEDIA_CACHE, MediaCacheSizes(), MediaCacheSizes(1, 1 << 24, 1 << 20)):
        with opened(path, sizes) as llm:
            answers = [
                llm.generate(question, options, images=images, speculation=False)
                for _ in range(3)
                for question in QUESTIONS
                for images in pictures
            ]
            found.append([(a.token_ids, a.logprobs) for a in answers])
    assert found[1] == found[0]
    assert found[2] == found[0]


@pytest.mark.parametrize(
    "options",
    [
        {"max_pixels": 64 * 64},
        {"min_pixels": 320 * 320, "max_pixels": 320 * 320},
        {"resized_height": 64, "resized_width": 96},
    ],
)
def test_options_that_change_pixels_are_part_of_the_key(
    options: dict[str, int], bundle: Path, runs: list[int]
) -> None:
    def ask(llm: LLM, **changed: int) -> tuple[int, ...]:
        part = {"type": "image", "image": encoded(1), **changed}
        content = [part, {"type": "text", "text": "What is this?"}]
        return llm.chat([{"role": "user", "content": content}], EIGHT).generation.token_ids

    with opened(bundle, NO_MEDIA_CACHE) as llm:
        expected = ask(llm, **options)
    runs.clear()
    with opened(bundle, MediaCacheSizes()) as llm:
        ask(llm)
        assert ask(llm, **options) == expected
        now = llm.metrics()
    assert len(set(runs)) == len(runs) == 2
    assert (now.embedding_hits, now.image_hits) == (0, 0)


def test_frames_of_a_video_are_part_of_the_key(bundle: Path, runs: list[int]) -> None:
    frames = [draw_image(seed, (64, 64)) for seed in range(4)]
    with opened(bundle, MediaCacheSizes()) as llm:
        for some in (frames, frames[::-1], frames[:2], frames):
            llm.generate("What moves?", EIGHT, videos=[some])
        now = llm.metrics()
    assert (len(runs), now.embedding_hits) == (3, 1)


def test_cache_that_is_off_keeps_nothing(bundle: Path, runs: list[int]) -> None:
    with opened(bundle, NO_MEDIA_CACHE) as llm:
        for question in QUESTIONS:
            llm.generate(question, EIGHT, images=[encoded(1)])
        now = llm.metrics()
    assert len(runs) == 2
    assert (now.embedding_bytes, now.embedding_host_bytes, now.image_bytes) == (0, 0, 0)


def test_preempted_sequence_finds_its_embeddings(
    bundle: Path, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pages are taken away, and no prefix is kept, so the prompt is computed again."""
    with opened(bundle, NO_MEDIA_CACHE) as llm:
        expected = llm.generate(QUESTIONS[0], EIGHT, images=[encoded(1)]).token_ids
    runs.clear()
    step, preempted = EngineCore._turn, list[int]()

    def preempting(self: EngineCore) -> None:
        step(self)
        first = next(iter(self.scheduler.running), None)
        if first is not None and first.in_answer and not preempted:
            preempted.append(1)
            self.scheduler._preempt(first)

    monkeypatch.setattr(EngineCore, "_turn", preempting)
    with opened(bundle, MediaCacheSizes()) as llm:
        assert llm.generate(QUESTIONS[0], EIGHT, images=[encoded(1)]).token_ids == expected
        assert (llm.metrics().preempted, llm.metrics().embedding_hits) == (1, 1)
    assert len(runs) == 1


def test_client_with_many_images_does_not_evict_those_of_another(bundle: Path) -> None:
    def ask(llm: LLM, seed: int, client: str) -> None:
        request = Request("What?", images=[encoded(seed)], sampling=EIGHT, client=client)
        llm.submit(request).finish()

    with opened(bundle, MediaCacheSizes()) as llm:
        ask(llm, 0, "quiet")
        room = 3 * llm.metrics().embedding_bytes
    with opened(bundle, MediaCacheSizes(room, 0, 0)) as llm:
        ask(llm, 0, "quiet")
        for seed in range(1, 7):
            ask(llm, seed, "flood")
        assert llm.metrics().embedding_bytes <= room
        ask(llm, 0, "quiet")
        assert llm.metrics().embedding_hits == 1


def test_embeddings_leave_the_device_for_the_host_and_return() -> None:
    one = 4 * 2 * 2 * 4
    cache = EncoderCache(MediaCacheSizes(one, 3 * one, 0), "cpu")
    for i in range(5):
        cache.put(bytes([i]), vision(float(i)), "")
    assert (cache.on_device.num_bytes, cache.on_host.num_bytes) == (one, 3 * one)
    assert cache.get(bytes([0]), "") is None
    for i in (4, 1, 4):  # on the device, on the host, and on the host since 1 took its place
        kept = cache.get(bytes([i]), "")
        assert kept is not None
        assert torch.equal(kept.embeds, vision(float(i)).embeds)
        assert torch.equal(kept.visual_levels, vision(float(i)).visual_levels)
    counts = cache.counts
    assert (counts["embedding_hits"], counts["embedding_host_hits"]) == (1, 2)
    assert counts["embedding_misses"] == 1


def test_tower_without_memory_runs_again_after_the_cache_is_dropped(
    bundle: Path, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward: Callable[..., Any] = VisionRunner.forward
    failed = list[int]()

    def short(self: VisionRunner, patches: Tensor, rows: Any) -> Any:
        if len(runs) == 1 and not failed:
            failed.append(1)
            raise torch.OutOfMemoryError
        return forward(self, patches, rows)

    monkeypatch.setattr(VisionRunner, "forward", short)
    with opened(bundle, MediaCacheSizes()) as llm:
        llm.generate(QUESTIONS[0], EIGHT, images=[encoded(1)])
        kept = llm.metrics().embedding_bytes
        assert llm.generate(QUESTIONS[0], EIGHT, images=[encoded(2)]).token_ids
        assert llm.metrics().embedding_bytes == kept
    assert failed


def test_prompt_without_digests_is_encoded_and_not_kept(bundle: Path, runs: list[int]) -> None:
    with opened(bundle, MediaCacheSizes()) as llm:
        inputs = llm.prepare(QUESTIONS[0], [Image.open(io.BytesIO(encoded(1)))])
        prompt: Prompt = llm.bundle.preprocessor().prompt(inputs)
        encoder = llm.bundle.vision_encoder()
        assert not encoder.keeps(prompt)
        encoder.encode(prompt)
        assert encoder.counts["embedding_bytes"] == 0
    assert len(runs) == 1
