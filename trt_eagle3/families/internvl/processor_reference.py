"""Prepare InternVL prompts with ``transformers``.

Image pixels are computed with Pillow (``GotOcr2ImageProcessorPil``), as in the engine's processor.
transformers' video processor needs torchvision. Frames of a tile's size go through the image
processor one by one instead, which computes the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from trt_eagle3.families.internvl.reference import InternVLReference
from trt_eagle3.multimodal import Processor
from trt_eagle3.multimodal.image import load_image
from trt_eagle3.multimodal.video import load_video
from trt_eagle3.parity.reference.processor import ReferenceInputs, check_transformers, decoded_text
from trt_eagle3.prompts.prompt_file import Question

__all__ = ["InternVLProcessorReference"]


class _ImageTextProcessor(transformers.InternVLProcessor):  # type: ignore[misc]
    """An InternVLProcessor whose video processor is set later."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


class InternVLProcessorReference:
    """Implements ``parity.processor.ProcessorReference`` for an InternVL checkpoint.

    ``reader`` is the engine's processor; files are decoded with its settings.
    """

    def __init__(self, checkpoint: Path, target: InternVLReference, reader: Processor) -> None:
        check_transformers()
        assert reader.video_config is not None, "a processor without videos"
        self._checkpoint, self._target = checkpoint, target
        self._video_config = reader.video_config

    def __call__(self, question: Question) -> ReferenceInputs | None:
        """Prepare ``question``; None if frames of a video would have to be resized."""
        images = [load_image(source) for source in question.images]
        videos = [load_video(s, self._video_config).frames for s in question.videos]
        side = self._target.config.vision_config.image_size[0]
        if any(video.shape[1:3] != (side, side) for video in videos):
            return None
        content = [{"type": "image"}] * len(images) + [{"type": "video"}] * len(videos)
        messages = [
            {"role": "user", "content": [*content, {"type": "text", "text": question.prompt}]}
        ]
        text = self._processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        media: dict[str, Any] = {"images": images} if images else {}
        media |= {"videos": [video.numpy() for video in videos]} if videos else {}
        out = self._processor(text=[text], return_tensors="pt", **media)
        token_ids = out["input_ids"][0]
        counts = self._tiles(images) + [len(video) for video in videos]
        return self._inputs(token_ids, out.get("pixel_values"), counts)

    def _inputs(
        self, token_ids: Tensor, pixels: Tensor | None, counts: Sequence[int]
    ) -> ReferenceInputs:
        config = self._target.config
        vision, merge = config.vision_config, round(1 / config.downsample_ratio)
        patch = vision.patch_size[0]
        side = vision.image_size[0] // patch
        patches = torch.empty(0, vision.num_channels * patch**2)
        if pixels is not None:
            patches = _patches(torch.as_tensor(pixels), patch, merge)
        grid_thw = torch.tensor([[count, side, side] for count in counts], dtype=torch.int64)
        no_seconds = torch.zeros(len(counts))
        positions, delta = self._target.rope_index(token_ids, grid_thw, no_seconds)
        return ReferenceInputs(
            token_ids=token_ids,
            position_ids=positions.int(),
            rope_delta=delta,
            patches=patches,
            grid_thw=grid_thw.reshape(-1, 3),
            visual_rows=token_ids == config.image_token_id,
        )

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode the tokens of an answer with ``transformers``, without special tokens."""
        return decoded_text(self._processor.tokenizer, token_ids)

    def _tiles(self, images: Sequence[Any]) -> list[int]:
        """Count the tiles of each image."""
        if not images:
            return []
        made = self._processor.image_processor(images, crop_to_patches=True)
        return [int(count) for count in made["num_patches"]]

    @cached_property
    def _processor(self) -> Any:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(self._checkpoint), local_files_only=True
        )
        values, _ = _ImageTextProcessor.get_processor_dict(
            str(self._checkpoint), local_files_only=True
        )
        image = transformers.GotOcr2ImageProcessorPil.from_pretrained(
            str(self._checkpoint), local_files_only=True
        )
        config = self._target.config
        processor = _ImageTextProcessor(
            image_processor=image,
            tokenizer=tokenizer,
            image_seq_length=values.get("image_seq_length", config.image_seq_length),
            chat_template=values.get("chat_template") or tokenizer.chat_template,
        )
        processor.video_processor = _Stills(image)
        return processor


class _Stills:
    """Replaces InternVLVideoProcessor: frames become images without resizing."""

    model_input_names = ("pixel_values_videos",)

    def __init__(self, images: Any) -> None:
        self._images = images

    def __call__(self, videos: Sequence[Any], **_: Any) -> dict[str, Any]:
        """Convert one video, or several with equal frame counts, as transformers requires."""
        pixels = [
            torch.cat(
                [
                    torch.as_tensor(
                        self._images(
                            frame, do_resize=False, crop_to_patches=False, return_tensors="pt"
                        )["pixel_values"]
                    )
                    for frame in video
                ]
            )
            for video in videos
        ]
        return {"pixel_values_videos": torch.stack(pixels)}


def _patches(pixels: Tensor, patch: int, merge: int) -> Tensor:
    """Cut tiles [F, C, H, W] into patches [n, C * p * p] in merge-block order."""
    count, channels, height, width = pixels.shape
    unit = patch * merge
    cut = pixels.view(count, channels, height // unit, merge, patch, width // unit, merge, patch)
    return cut.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, channels * patch**2)
