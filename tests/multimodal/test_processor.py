"""Whole prompts against transformers: live where its processor runs without torchvision, else
against recorded runs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tests.multimodal.conftest import GOLDENS, IMAGE_CONFIG, TinySpec, spec_of
from tests.multimodal.record_goldens import CHAT_TEMPLATE, build_model, pattern, train_tokenizer
from trt_eagle3.errors import UserError
from trt_eagle3.families.qwen3_vl import FAMILY
from trt_eagle3.multimodal import ModelInputs, Processor, Video, copy_processor_files
from trt_eagle3.multimodal import processor as processor_module
from trt_eagle3.multimodal.caller import Caller
from trt_eagle3.multimodal.final_message import PromptEnding
from trt_eagle3.parity.reference.processor import ReferenceInputs

RECORD = json.loads((GOLDENS / "goldens.json").read_text())
ARRAYS = np.load(GOLDENS / "goldens.npz")
VIDEOS = [facts for facts in RECORD["videos"] if "error" not in facts]


class ImageTextProcessor(transformers.Qwen3VLProcessor):
    """Qwen3VLProcessor without the video processor, which needs torchvision."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


def picture(seed: int, height: int, width: int) -> Image.Image:
    return Image.fromarray(pattern(seed, 1, height, width)[0])


def hf_inputs(
    messages: list[dict[str, Any]], images: list[Image.Image], **ending: bool
) -> ReferenceInputs:
    """The same prompt through transformers, in our form."""
    keywords = {
        key: value for key, value in IMAGE_CONFIG.items() if not key.endswith(("_class", "_type"))
    }
    image_processor = transformers.Qwen2VLImageProcessorPil(**keywords)
    processor = ImageTextProcessor(
        image_processor=image_processor, tokenizer=train_tokenizer(), chat_template=CHAT_TEMPLATE
    )
    ending = ending or {"add_generation_prompt": True}
    text = processor.apply_chat_template(messages, tokenize=False, **ending)
    out = processor(text=[text], images=images or None, return_tensors="pt")
    kinds, grids = out["mm_token_type_ids"], out.get("image_grid_thw")
    model = build_model(processor.tokenizer)
    positions, deltas = model.get_rope_index(
        out["input_ids"], mm_token_type_ids=kinds, image_grid_thw=grids
    )
    empty_grid, empty_patches = torch.empty(0, 3, dtype=torch.int64), torch.empty(0, 0)
    return ReferenceInputs(
        token_ids=out["input_ids"][0],
        position_ids=positions[:, 0].int(),
        rope_delta=int(deltas[0]),
        patches=out.get("pixel_values", empty_patches),
        grid_thw=empty_grid if grids is None else grids,
        visual_rows=kinds[0] != 0,
    )


def assert_same(ours: ModelInputs, theirs: ModelInputs | ReferenceInputs) -> None:
    for field in fields(ReferenceInputs):
        name, actual, expected = field.name, getattr(ours, field.name), getattr(theirs, field.name)
        if isinstance(expected, torch.Tensor):
            assert actual.dtype == expected.dtype, name
            assert torch.equal(actual, expected), name
        else:
            assert actual == expected, name


IMAGES = [picture(1, 60, 100), picture(2, 33, 130), picture(3, 20, 20)]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_prompt_with_images_equals_hf(processor: Processor, count: int, system: str | None) -> None:
    content = [{"type": "image"}] * count + [
        {"type": "text", "text": "Compare, please \u2014 na\u00efvely."}
    ]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    ours = processor.prompt("Compare, please \u2014 na\u00efvely.", IMAGES[:count], system=system)
    assert_same(ours, hf_inputs(messages, IMAGES[:count]))


@pytest.mark.parametrize(
    ("ending", "options"),
    [
        ("final_message", {"continue_final_message": True}),
        ("last_turn", {"add_generation_prompt": False}),
    ],
)
def test_prompt_with_another_ending_equals_hf(
    processor: Processor, ending: PromptEnding, options: dict[str, bool]
) -> None:
    content = [{"type": "image", "image": IMAGES[0]}, {"type": "text", "text": "Compare."}]
    for final in ("Both show a c", "Both ", [{"type": "text", "text": "Both show"}]):
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": final},
        ]
        ours = processor.messages(messages, ending=ending)
        assert_same(ours, hf_inputs(messages, IMAGES[:1], **options))


def conversation(image: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "One:"},
                image(0),
                {"type": "text", "text": "two:"},
                image(1),
            ],
        },
        {"role": "assistant", "content": "Seen."},
        {"role": "user", "content": [image(2), {"type": "text", "text": "And this?"}]},
    ]


def test_conversation_with_images_between_texts_equals_hf(processor: Processor) -> None:
    ours = processor.messages(conversation(lambda i: {"type": "image", "image": IMAGES[i]}))
    assert_same(ours, hf_inputs(conversation(lambda _: {"type": "image"}), IMAGES))


def test_swapped_images_would_be_noticed(processor: Processor) -> None:
    ours = processor.messages(conversation(lambda i: {"type": "image", "image": IMAGES[2 - i]}))
    with pytest.raises(AssertionError, match=r"token_ids|patches"):
        assert_same(ours, hf_inputs(conversation(lambda _: {"type": "image"}), IMAGES))


def recorded_processor(size: dict[str, int]) -> Processor:
    """Our processor over the files that transformers saved, with a case's video size limits."""
    directory = GOLDENS / "processor"
    processor = FAMILY.processor(directory, spec_of(directory))
    limits = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    processor.video_config = replace(processor.video_config, **limits)
    return processor


def video_of(
    seed: int, frames: int, height: int, width: int, fps: float, sample: bool = False
) -> Video:
    return Video(
        [Image.fromarray(frame) for frame in pattern(seed, frames, height, width)],
        fps=fps,
        sample=sample,
    )


def recorded_video(facts: dict[str, Any]) -> Video:
    # without metadata transformers takes 24 frames per second
    names = ("seed", "frames", "height", "width")
    return video_of(
        *(facts[name] for name in names), fps=facts["fps"] or 24.0, sample=facts["sample"]
    )


def assert_recorded(ours: ModelInputs, name: str, facts: dict[str, Any]) -> None:
    np.testing.assert_array_equal(ours.token_ids, ARRAYS[f"{name}.token_ids"])
    np.testing.assert_array_equal(ours.position_ids, ARRAYS[f"{name}.position_ids"])
    assert ours.rope_delta == facts["rope_delta"]


@pytest.mark.parametrize("facts", VIDEOS, ids=lambda facts: facts["name"])
def test_prompt_with_video_equals_the_recorded_one(facts: dict[str, Any]) -> None:
    ours = recorded_processor(facts["size"]).prompt(
        "Describe the video.", videos=[recorded_video(facts)]
    )
    assert_recorded(ours, facts["name"], facts)
    np.testing.assert_array_equal(ours.grid_thw, ARRAYS[f"{facts['name']}.video_grid_thw"])


@pytest.mark.parametrize("fault", ["first frame's time", "no time", "no vision_end"])
def test_wrong_frame_text_would_be_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = next(facts for facts in VIDEOS if facts["name"] == "five_frames_down")
    processor, video = recorded_processor(facts["size"]), recorded_video(facts)
    if fault == "first frame's time":
        monkeypatch.setattr(
            processor_module, "patch_times", lambda times, size: list(times)[::size]
        )
    elif fault == "no vision_end":
        monkeypatch.setattr(processor.rules, "_end", "")
    else:
        encode = processor._control.encoder.encode

        class Timeless:
            def encode(self, text: str, caller: Caller, **options: bool) -> list[int]:
                return encode(re.sub(r"<[\d.]+ seconds>", "", text), caller, **options)

        monkeypatch.setattr(processor._control, "encoder", Timeless())
    with pytest.raises(AssertionError):
        assert_recorded(
            processor.prompt("Describe the video.", videos=[video]), facts["name"], facts
        )


def test_images_and_videos_in_several_turns_equal_the_recorded_ones() -> None:
    processor = recorded_processor({"shortest_edge": 4096, "longest_edge": 16384})
    first, second = video_of(93, 4, 40, 64, fps=2.0), video_of(94, 3, 64, 40, fps=1.5)
    images = [
        {"type": "image", "image": picture(91, 48, 80)},
        {"type": "image", "image": picture(92, 70, 33)},
    ]
    text = {"type": "text", "text": "First."}
    ours = processor.messages(
        [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [images[0], text, {"type": "video", "video": first}, images[1]],
            },
            {"role": "assistant", "content": "Seen."},
            {
                "role": "user",
                "content": [
                    {"type": "video", "video": second},
                    {"type": "text", "text": "And now?"},
                ],
            },
        ]
    )
    assert_recorded(ours, "mixed", RECORD["mixed"])
    image_grids, video_grids = ARRAYS["mixed.image_grid_thw"], ARRAYS["mixed.video_grid_thw"]
    in_order = [image_grids[0], video_grids[0], image_grids[1], video_grids[1]]
    np.testing.assert_array_equal(ours.grid_thw, np.stack(in_order))
    assert ours.patches.shape[0] == int(ours.grid_thw.prod(1).sum())
    assert int(ours.visual_rows.sum()) * 4 == ours.patches.shape[0]


def test_text_alone_has_empty_visuals(processor: Processor) -> None:
    inputs = processor.prompt("Hello")
    assert inputs.visuals == ()
    assert len(inputs.patches) == 0
    assert inputs.grid_thw.shape == (0, 3)
    assert inputs.rope_delta == 0
    assert not inputs.visual_rows.any()


def test_openai_image_url_takes_a_data_uri(processor: Processor, tmp_path: Path) -> None:
    path = tmp_path / "cat.png"
    IMAGES[0].save(path)
    part = {"type": "image_url", "image_url": {"url": f"file://{path}"}}
    ours = processor.messages([{"role": "user", "content": [part, {"type": "text", "text": "Hi"}]}])
    assert_same(ours, processor.prompt("Hi", [IMAGES[0]]))


def test_copied_files_make_the_same_prompts(
    published: Path, spec: TinySpec, tmp_path: Path
) -> None:
    written = copy_processor_files(published, tmp_path / "processor")
    assert tmp_path / "processor" / "tokenizer.json" in written
    copied = FAMILY.processor(tmp_path / "processor", spec)
    assert_same(
        copied.prompt("Hi", IMAGES[:2]),
        FAMILY.processor(published, spec).prompt("Hi", IMAGES[:2]),
    )


def test_copying_from_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        copy_processor_files(tmp_path, tmp_path / "processor")


def test_tokenizer_of_another_checkpoint_is_refused(published: Path, spec: TinySpec) -> None:
    with pytest.raises(UserError, match="no token for image_token_id = 151655"):
        FAMILY.processor(
            published, replace(spec, vision=replace(spec.vision, image_token_id=151655))
        )


def test_tokenizer_that_knows_more_than_the_token_table_is_refused(
    published: Path, spec: TinySpec
) -> None:
    with pytest.raises(
        UserError,
        match=rf"has id {spec.vocab_size - 1}, the target's token table {spec.vocab_size - 1} ",
    ):
        FAMILY.processor(published, replace(spec, vocab_size=spec.vocab_size - 1))


def test_missing_directory_is_refused(spec: TinySpec) -> None:
    with pytest.raises(UserError, match="no such directory"):
        FAMILY.processor(Path("absent"), spec)


def test_prompt_over_the_limit_is_refused_with_its_parts(published: Path, spec: TinySpec) -> None:
    length = FAMILY.processor(published, spec).prompt("Hi", IMAGES[:1]).token_ids.numel()
    fits = FAMILY.processor(published, spec, max_prompt_len=length)
    assert fits.prompt("Hi", IMAGES[:1]).token_ids.numel() == length
    short = FAMILY.processor(published, spec, max_prompt_len=length - 1)
    with pytest.raises(
        UserError, match=rf"^prompt: {length} tokens \(of these image \(100x60 pixels\) 6\)"
    ) as caught:
        short.prompt("Hi", IMAGES[:1])
    assert "\n" not in str(caught.value)


class Frames(list[Image.Image]):
    """Counts the frames that are read."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_read += 1
        return super().__getitem__(index)


def test_video_over_the_limit_is_refused_at_its_first_frame(
    published: Path, spec: TinySpec
) -> None:
    processor = FAMILY.processor(published, spec, max_prompt_len=100)
    frames = Frames([picture(1, 64, 64)] * 300)
    part = {"type": "video", "video": frames, "min_pixels": 1 << 20}
    with pytest.raises(UserError, match=r"tokens \(of these video \d+\), the limit is 100"):
        processor.messages([{"role": "user", "content": [part]}])
    assert frames.num_read < 10


def test_other_threads_run_while_a_long_text_is_tokenised(processor: Processor) -> None:
    turns, done = list[float](), threading.Event()

    def run() -> None:
        while not done.wait(0.001):
            turns.append(time.perf_counter())

    with ThreadPoolExecutor(1) as pool:
        pool.submit(run)
        start = time.perf_counter()
        processor.prompt("What is it? " * 50_000)
        end = time.perf_counter()
        done.set()
    moments = [start, *(t for t in turns if start < t < end), end]
    longest = max(b - a for a, b in pairwise(moments))
    assert longest < 0.6 * (end - start)  # 0.9 if nobody runs beside it, 0.1 otherwise


@pytest.mark.parametrize(
    "messages", [[{"role": "user", "content": "a"}] * 9, [{"role": "user", "content": ["a"] * 9}]]
)
def test_more_messages_than_tokens_are_refused_before_any_is_rendered(
    published: Path, spec: TinySpec, messages: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = FAMILY.processor(published, spec, max_prompt_len=8)
    monkeypatch.setattr(processor.template, "render", None)
    with pytest.raises(UserError, match="prompt: 9 messages and parts, expected at most"):
        processor.messages(messages)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([{"type": "audio", "audio": b""}], "unknown part"),
        ([{"type": "image"}], "unknown part"),
        ("half a \udc80 character", "text: not Unicode text at character 7"),
        (None, "expected a string or a list"),
        ([{"type": "image", "image": None}], "unknown part"),
        ([{"type": ["image"], "image": "x"}], "unknown part"),
        (
            [{"type": "image", "image": Image.new("RGB", (999, 3))}],
            "aspect ratio of at most 200, got 999x3",
        ),
        ([{"type": "image", "image": b"text"}], "image (4 bytes): unknown image format"),
        ([{"type": "video", "video": [Image.new("RGB", (64, 64))]}], "at least 2 frames, got 1"),
    ],
)
def test_bad_message_is_refused_in_one_line(
    processor: Processor, content: Any, expected: str
) -> None:
    with pytest.raises(UserError) as caught:
        processor.messages([{"role": "user", "content": content}])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_second_image_is_named_by_its_place(processor: Processor) -> None:
    with pytest.raises(
        UserError, match=r"image absent\.png \(visual 2 of the prompt\): no such file"
    ):
        processor.prompt("Hi", [IMAGES[0], "absent.png"])


def test_import_loads_neither_transformers_nor_torchvision() -> None:
    code = (
        "import sys, trt_eagle3.multimodal; print(sorted({'transformers', 'torchvision', 'av'} "
        "& set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
