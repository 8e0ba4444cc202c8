"""A published-style processor directory and the spec of a tiny target, built offline."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.multimodal.record_goldens import CHAT_TEMPLATE, train_tokenizer
from trt_eagle3.families.qwen3_vl import FAMILY
from trt_eagle3.multimodal import Processor

GOLDENS = Path(__file__).parent / "goldens"

IMAGE_CONFIG = {
    "size": {"shortest_edge": 1024, "longest_edge": 16384},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
VIDEO_CONFIG = {
    **IMAGE_CONFIG,
    "size": {"shortest_edge": 4096, "longest_edge": 16384},
    "video_processor_type": "Qwen3VLVideoProcessor",
}
del VIDEO_CONFIG["image_processor_type"]


@dataclass(frozen=True)
class TinyVision:
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    in_channels: int = 3
    image_token_id: int = 0
    video_token_id: int = 0
    vision_start_token_id: int = 0
    vision_end_token_id: int = 0


@dataclass(frozen=True)
class TinySpec:
    """What a TargetSpec has, as far as the processor looks."""

    eos_token_ids: tuple[int, ...]
    vocab_size: int
    vision: TinyVision


def spec_of(directory: Path) -> TinySpec:
    """Token ids as this directory's tokenizer numbers them."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_end|>")
    image, video, start, end, eos = (tokenizer.token_to_id(name) for name in names)
    vision = TinyVision(
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    return TinySpec((eos,), tokenizer.get_vocab_size(), vision)


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a Qwen3-VL repository, apart from its weights."""
    directory = tmp_path_factory.mktemp("published")
    train_tokenizer().save_pretrained(directory)
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    (directory / "preprocessor_config.json").write_text(json.dumps(IMAGE_CONFIG))
    (directory / "video_preprocessor_config.json").write_text(json.dumps(VIDEO_CONFIG))
    return directory


@pytest.fixture(scope="session")
def spec(published: Path) -> TinySpec:
    return spec_of(published)


@pytest.fixture
def processor(published: Path, spec: TinySpec) -> Processor:
    return FAMILY.processor(published, spec)
