"""Build, load, generate: the path a user takes, over a random pair in the published layouts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.decode.bundle import config_of, save_pair
from trt_eagle3 import LLM, build, load
from trt_eagle3.decode.core import EngineCore
from trt_eagle3.decode.loaded_bundle import LoadedBundle, open_graph_of
from trt_eagle3.decode.request.preprocess import PromptPreprocessor
from trt_eagle3.decode.request.vision_encoder import VisionRunner
from trt_eagle3.engine.runtime.session import Session
from trt_eagle3.errors import DeviceMemoryError, UserError

PROMPT = "What is in the picture?"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("pair")
    save_pair(directory)
    return directory


@pytest.fixture(scope="module")
def engine(pair: Path) -> LLM:
    return load(build(config_of(pair)).path)


@pytest.fixture(scope="module")
def image() -> Image.Image:
    pixels = torch.randint(0, 255, (70, 100, 3), generator=torch.Generator().manual_seed(0))
    return Image.fromarray(pixels.byte().numpy())


def test_generate_with_and_without_speculation_says_the_same(
    engine: LLM, image: Image.Image
) -> None:
    for images in ((), (image,), (image, image)):
        options: dict[str, Any] = {"images": images, "max_tokens": 20, "ignore_eos": True}
        fast = engine.generate(PROMPT, **options)
        plain = engine.generate(PROMPT, **options, speculation=False)
        assert fast.token_ids == plain.token_ids
        assert (fast.text, fast.finish_reason) == (plain.text, "length")
        assert (plain.acceptance_length, plain.accepted_lengths) == (None, ())
        assert plain.num_forwards == 19
        assert len(fast.accepted_lengths) <= fast.num_forwards <= 19


def test_images_that_outgrow_the_memory_fail_their_request_in_one_line(
    engine: LLM, image: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = engine.generate(PROMPT, images=[image], max_tokens=8).token_ids

    def full(*_: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 66.9 GiB.")

    with monkeypatch.context() as patch:
        patch.setattr(VisionRunner, "forward", full)
        with pytest.raises(
            DeviceMemoryError, match=r"images of \d+ visual tokens need more memory .* Send fewer"
        ):
            engine.generate(PROMPT, images=[image.rotate(90)], max_tokens=8)
    assert engine.generate(PROMPT, images=[image], max_tokens=8).token_ids == expected


def test_bundles_with_and_without_weights_or_draft_say_the_same(
    pair: Path, engine: LLM, tmp_path: Path
) -> None:
    expected = engine.generate(PROMPT, max_tokens=8).token_ids
    referenced = build(config_of(pair), output=tmp_path / "referenced", reference_weights=True)
    assert not (referenced.path / "weights").exists()
    assert referenced.num_bytes < 1_000_000
    assert load(referenced.path).generate(PROMPT, max_tokens=8).token_ids == expected
    alone = load(build(config_of(pair, draft=None), output=tmp_path / "alone").path)
    assert alone.bundle.drafter is None
    assert alone.generate(PROMPT, max_tokens=8).token_ids == expected


def test_contained_bundle_outlives_its_checkpoints(tmp_path: Path) -> None:
    save_pair(tmp_path)
    report = build(config_of(tmp_path))
    expected = load(report.path).generate(PROMPT, max_tokens=4).token_ids
    moved = report.path.rename(tmp_path / "moved")
    for file in [*(tmp_path / "target").iterdir(), *(tmp_path / "draft").iterdir()]:
        file.unlink()
    assert load(moved).generate(PROMPT, max_tokens=4).token_ids == expected


def test_target_without_deepstack_sees_images(tmp_path: Path, image: Image.Image) -> None:
    save_pair(tmp_path, deepstack_visual_indexes=[])
    engine = load(build(config_of(tmp_path)).path)
    options: dict[str, Any] = {"images": [image], "max_tokens": 9, "ignore_eos": True}
    assert (
        engine.generate(PROMPT, **options).token_ids
        == engine.generate(PROMPT, **options, speculation=False).token_ids
    )


def test_stream_chunks_join_to_the_text_and_end_at_max_tokens(engine: LLM) -> None:
    for max_tokens in (1, 2, 9):
        answer = engine.stream(PROMPT, max_tokens=max_tokens, ignore_eos=True)
        chunks = list(answer)
        assert "".join(chunk.text for chunk in chunks) == answer.generation.text
        assert tuple(t for chunk in chunks for t in chunk.token_ids) == answer.generation.token_ids
        assert len(answer.generation.token_ids) == max_tokens


def test_end_token_ends_the_answer_unless_it_is_to_be_ignored(engine: LLM) -> None:
    output_ids = engine.generate(PROMPT, max_tokens=20, ignore_eos=True)
    stop = output_ids.token_ids[7]
    done = engine.generate(PROMPT, max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    assert done.token_ids == output_ids.token_ids[: output_ids.token_ids.index(stop) + 1]
    assert (done.finish_reason, output_ids.finish_reason) == ("stop", "length")


def test_answer_that_is_left_early_returns_its_pages(engine: LLM) -> None:
    answer = engine.stream(PROMPT, ignore_eos=True)
    stream = iter(answer)
    next(stream)
    stream.close()
    assert answer.wait(30)
    assert answer.generation.finish_reason == "cancelled"
    assert engine.metrics().kv_pages_used == 0


def test_generation_ends_at_max_seq_len(engine: LLM) -> None:
    done = engine.generate(PROMPT, max_tokens=1000, ignore_eos=True)
    assert done.prompt_tokens + len(done.token_ids) == 200
    assert done.finish_reason == "length"


def test_text_prompt_never_opens_the_vision_tower(pair: Path, image: Image.Image) -> None:
    opened: list[str] = []

    def sessions(bundle: LoadedBundle, graph: str, intermediates: Sequence[str]) -> Session:
        opened.append(graph)
        return open_graph_of(bundle, graph, intermediates)

    engine = LLM(LoadedBundle.open(build(config_of(pair)).path, sessions=sessions))
    engine.generate(PROMPT, max_tokens=1)
    assert "vision" not in opened
    engine.generate(PROMPT, images=[image], max_tokens=1)
    assert "vision" in opened


def test_prompts_past_the_limits_are_refused_in_one_line(engine: LLM, image: Image.Image) -> None:
    for options, message in (
        ({"max_tokens": 0}, "max_tokens: expected a whole number of at least 1, got 0"),
        ({"max_tokens": 1.5}, "max_tokens: expected a whole number of at least 1, got 1.5"),
        ({"prompt": 5}, "prompt: expected a text or a list of messages, got int"),
        ({"images": {"a": image}}, "images: expected paths, .* one or a list of them, got dict"),
        ({"videos": {"a": 1}}, "videos: expected paths, .* one or a list of them, got dict"),
        ({"images": [torch.zeros(2, 2)]}, "image: expected a path, .* got Tensor"),
        (
            {"prompt": [{"role": "user", "content": "a"}], "images": [image]},
            "expected none beside a list of messages",
        ),
        ({"prompt": "word " * 300}, "prompt: .* tokens, the limit is 199"),
    ):
        with pytest.raises(UserError, match=message) as error:
            engine.generate(**{"prompt": PROMPT, **options})
        assert "\n" not in str(error.value)
    tight = replace_limits(engine, max_visual_tokens=2)
    with pytest.raises(UserError, match="visual tokens, this bundle takes 2"):
        tight.prepare(PROMPT, images=[image])


def test_no_images_can_be_none(engine: LLM) -> None:
    assert engine.prepare(PROMPT, images=None).token_ids.equal(engine.prepare(PROMPT).token_ids)


def replace_limits(engine: LLM, **changes: int) -> LLM:
    bundle = LoadedBundle.open(engine.bundle.path)
    return LLM(replace(bundle, limits=bundle.limits.model_copy(update=changes)))


def test_first_image_opens_the_tower_while_it_is_decoded(
    pair: Path, image: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = threading.Event()
    waited: list[bool] = []
    prepare = PromptPreprocessor.run

    def sessions(bundle: LoadedBundle, graph: str, intermediates: Sequence[str]) -> Session:
        session = open_graph_of(bundle, graph, intermediates)
        if graph == "vision":
            opened.set()
        return session

    def slow(self: PromptPreprocessor, *args: Any) -> Any:
        waited.append(opened.wait(10))
        return prepare(self, *args)

    monkeypatch.setattr(PromptPreprocessor, "run", slow)
    with LLM(LoadedBundle.open(build(config_of(pair)).path, sessions=sessions)) as engine:
        assert engine.generate(PROMPT, images=[image], max_tokens=1).token_ids
    assert waited == [True]


def test_start_opens_every_graph_and_a_process_that_decodes(pair: Path) -> None:
    opened: list[str] = []

    def sessions(bundle: LoadedBundle, graph: str, intermediates: Sequence[str]) -> Session:
        opened.append(graph)
        return open_graph_of(bundle, graph, intermediates)

    with LLM(LoadedBundle.open(build(config_of(pair)).path, sessions=sessions)) as engine:
        engine.start()
        engine.start()
        assert sorted(opened) == ["draft", "fuse", "target", "vision"]
        decoders = engine.bundle.processor.decoders
        assert decoders is not None
        assert decoders._all


def test_tower_that_cannot_be_opened_fails_the_image_alone(pair: Path, image: Image.Image) -> None:
    def sessions(bundle: LoadedBundle, graph: str, intermediates: Sequence[str]) -> Session:
        if graph == "vision":
            raise UserError("vision: broken")
        return open_graph_of(bundle, graph, intermediates)

    with LLM(LoadedBundle.open(build(config_of(pair)).path, sessions=sessions)) as engine:
        with pytest.raises(UserError, match="vision: broken"):
            engine.generate(PROMPT, images=[image], max_tokens=1)
        with pytest.raises(UserError, match="vision: broken"):
            engine.start()
        assert engine.generate(PROMPT, max_tokens=1).token_ids


def test_costs_are_measured_after_the_first_token(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[int] = []
    monkeypatch.setattr(
        EngineCore,
        "_measure_costs",
        lambda self: known.append(len(self.scheduler.running[0].tokens)),
    )
    with LLM(build(config_of(pair)).path) as engine:
        engine.generate(PROMPT, max_tokens=4, ignore_eos=True)
    assert known[0] == 1
