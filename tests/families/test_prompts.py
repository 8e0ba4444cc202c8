"""Prompts of Qwen2.5-VL and InternVL are what transformers' processors make of them, element for
element; of videos, what they made on a machine with torchvision (``record_goldens.py``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor

from tests.families.internvl.random_pair import save_internvl
from tests.families.qwen2_5_vl.random_pair import save_qwen25
from tests.families.record_goldens import CASES, GOLDENS, SAMPLES, digest
from tests.multimodal.record_goldens import collapse_pads, pattern
from trt_eagle3.errors import UserError
from trt_eagle3.families.internvl.processor_reference import _ImageTextProcessor, _patches
from trt_eagle3.families.registry import family_of, read_target
from trt_eagle3.multimodal import Processor, Video
from trt_eagle3.multimodal.video_file import frame_indices

RECORDED = json.loads(GOLDENS.read_text())
FAMILIES = {"qwen2_5_vl": save_qwen25, "internvl": save_internvl}
IMAGES = [Image.fromarray(pattern(i, 1, *size)[0]) for i, size in enumerate([(60, 100), (33, 130)])]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("prompts")
    for name, save in FAMILIES.items():
        save(root / name)
    return {name: root / name for name in FAMILIES}


def processor(folder: Path, **options: Any) -> Processor:
    spec = read_target(folder)
    return family_of(spec).processor(folder, spec, **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_prompt_with_video_equals_the_recorded_one(
    family: str, case: tuple[str, int, int, int, float], checkpoints: dict[str, Path]
) -> None:
    name, frames, height, width, fps = case
    pixels = pattern([c[0] for c in CASES].index(name), frames, height, width)
    video = Video([Image.fromarray(frame) for frame in pixels], fps=fps)
    made = processor(checkpoints[family])
    inputs = made.prompt("What moves?", videos=[video])
    expected = RECORDED[family]["videos"][name]
    assert inputs.grid_thw.tolist() == [expected["grid"]]
    assert digest(inputs.patches) == expected["patches"]
    text = made.tokenizer.decode(inputs.token_ids.tolist(), skip_special_tokens=False)
    if family == "internvl":
        assert text.replace("<IMG_CONTEXT>" * 9, "*9") == expected["text"]
        assert inputs.position_ids.tolist() == [list(range(len(inputs.token_ids)))] * 3
    else:
        assert collapse_pads(text) == expected["text"]
        assert digest(inputs.position_ids) == expected["positions"]
        assert inputs.rope_delta == expected["delta"]


@pytest.mark.parametrize("family", FAMILIES)
def test_frames_of_files_are_those_that_transformers_takes(
    family: str, checkpoints: dict[str, Path]
) -> None:
    config = processor(checkpoints[family]).video_config
    assert config is not None
    found = [frame_indices(total, fps, config).tolist() for total, fps in SAMPLES]
    assert found == RECORDED[family]["samples"]


def conversation(part: Any) -> list[dict[str, Any]]:
    text = {"type": "text", "text": "Compare, please — naïvely."}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "One:"}, part(0), text]},
        {"role": "assistant", "content": "Seen."},
        {"role": "user", "content": [part(1), part(0), {"type": "text", "text": "And this?"}]},
    ]


def theirs(
    family: str, folder: Path, shown: Sequence[Image.Image] = IMAGES
) -> tuple[Tensor, Tensor]:
    """Token ids and patches of the conversation."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        conversation(lambda _: {"type": "image"}), add_generation_prompt=True, tokenize=False
    )
    images = [shown[0], shown[1], shown[0]]
    if family == "internvl":
        made = _ImageTextProcessor(
            image_processor=transformers.GotOcr2ImageProcessorPil.from_pretrained(folder),
            tokenizer=tokenizer,
            image_seq_length=9,
        )
        out = made(text=[text], images=images, return_tensors="pt")
        return out["input_ids"][0], _patches(out["pixel_values"], 4, 2)
    pixels = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder)(
        images=images, return_tensors="pt"
    )
    pads = iter(pixels["image_grid_thw"].prod(1) // 4)
    parts = text.split("<|image_pad|>")
    joined = "".join(p + "<|image_pad|>" * int(next(pads)) for p in parts[:-1]) + parts[-1]
    return torch.tensor(tokenizer(joined)["input_ids"]), pixels["pixel_values"]


@pytest.mark.parametrize("family", FAMILIES)
def test_conversation_with_images_equals_transformers(
    family: str, checkpoints: dict[str, Path]
) -> None:
    folder = checkpoints[family]
    ours = processor(folder).messages(conversation(lambda i: {"type": "image", "image": IMAGES[i]}))
    ids, patches = theirs(family, folder)
    assert torch.equal(ours.token_ids, ids)
    np.testing.assert_array_equal(ours.patches.numpy(), patches.numpy())


@pytest.mark.parametrize("family", FAMILIES)
def test_images_of_one_pixel_equal_transformers(family: str, checkpoints: dict[str, Path]) -> None:
    shown = [Image.new("RGB", (1, 1), color) for color in ((200, 30, 90), (0, 255, 7))]
    folder = checkpoints[family]
    ours = processor(folder).messages(conversation(lambda i: {"type": "image", "image": shown[i]}))
    ids, patches = theirs(family, folder, shown)
    assert torch.equal(ours.token_ids, ids)
    np.testing.assert_array_equal(ours.patches.numpy(), patches.numpy())


@pytest.mark.parametrize("family", FAMILIES)
def test_marks_that_a_user_writes_are_text(family: str, checkpoints: dict[str, Path]) -> None:
    made = processor(checkpoints[family])
    wrote = "<|image_pad|><IMG_CONTEXT><img></img><video><|video_pad|>"
    inputs = made.prompt(wrote, IMAGES[:1])
    plain = made.prompt("x", IMAGES[:1])
    assert int(inputs.visual_rows.sum()) == int(plain.visual_rows.sum())
    assert made.decode(inputs.token_ids.tolist()).count(wrote) == 1


def test_tiles_beyond_counting_are_refused_at_once(tmp_path: Path) -> None:
    save_internvl(tmp_path, max_patches=2**31 - 1)
    with pytest.raises(UserError, match="max_patches: expected at most 1024, got 2147483647"):
        processor(tmp_path)
