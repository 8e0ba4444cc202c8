"""Prepare Qwen3-VL prompts with ``transformers``.

Image pixels are computed with Pillow (``Qwen2VLImageProcessorPil``), as in the engine's processor.
Frames of videos go through the same processor one by one (``parity/reference/frames.py``). The text
and times around them are computed by ``Qwen3VLProcessor``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from trt_eagle3.families.qwen3_vl.reference import Qwen3VLReference
from trt_eagle3.multimodal import Processor
from trt_eagle3.multimodal.image import load_image
from trt_eagle3.multimodal.video import load_video
from trt_eagle3.parity.reference.frames import FrameProcessor, Frames
from trt_eagle3.parity.reference.processor import ReferenceInputs, check_transformers, decoded_text
from trt_eagle3.prompts.prompt_file import Question

__all__ = ["Qwen3VLProcessorReference"]


class _ImageTextProcessor(transformers.Qwen3VLProcessor):  # type: ignore[misc]
    """A Qwen3VLProcessor whose video processor is set later."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


class Qwen3VLProcessorReference:
    """Implements ``parity.processor.ProcessorReference`` for a Qwen3-VL checkpoint.

    ``target`` computes its positions. ``reader`` is the engine's processor; files are decoded with
    its settings.
    """

    _kind: Any = _ImageTextProcessor

    def __init__(self, checkpoint: Path, target: Qwen3VLReference, reader: Processor) -> None:
        check_transformers()
        assert reader.video_config is not None, "a processor without videos"
        self._checkpoint, self._target = checkpoint, target
        self._video_config = reader.video_config

    def __call__(self, question: Question) -> ReferenceInputs | None:
        """Prepare ``question``; None if frames of a video would have to be resized."""
        images = [load_image(source) for source in question.images]
        videos = [self._video(source) for source in question.videos]
        if not all(self._videos.fits(video) for video in videos):
            return None
        content = [{"type": "image"}] * len(images) + [{"type": "video"}] * len(videos)
        messages = [
            {"role": "user", "content": [*content, {"type": "text", "text": question.prompt}]}
        ]
        text = self._processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        media: dict[str, Any] = {"images": images} if images else {}
        if videos:
            media["videos"] = [video.pixels.numpy() for video in videos]
            media |= {
                "video_metadata": [self._metadata(video) for video in videos],
                "do_sample_frames": False,
            }
        out = self._processor(text=[text], return_tensors="pt", **media, **self._options(videos))
        token_ids = out["input_ids"][0]
        grids = [out[name] for name in ("image_grid_thw", "video_grid_thw") if name in out]
        grid_thw = torch.cat(grids) if grids else torch.empty(0, 3, dtype=torch.int64)
        positions, delta = self._positions(token_ids, grid_thw, out)
        patches = [out[name] for name in ("pixel_values", "pixel_values_videos") if name in out]
        config = self._target.config.vision_config
        width = config.in_channels * config.temporal_patch_size * config.patch_size**2
        return ReferenceInputs(
            token_ids=token_ids,
            position_ids=positions.int(),
            rope_delta=delta,
            patches=torch.cat(patches) if patches else torch.empty(0, width),
            grid_thw=grid_thw,
            visual_rows=self._visual_rows(out),
        )

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode the tokens of an answer with ``transformers``, without special tokens."""
        return decoded_text(self._processor.tokenizer, token_ids)

    def _options(self, _videos: Sequence[Frames]) -> dict[str, Any]:
        """Return further options of the processor."""
        return {}

    def _visual_rows(self, out: Mapping[str, Any]) -> Tensor:
        """Return bool [P], True at visual rows."""
        rows: Tensor = out["mm_token_type_ids"][0] != 0
        return rows

    def _video(self, source: Any) -> Frames:
        loaded = load_video(source, self._video_config)
        return Frames(loaded.frames, loaded.times, loaded.fps)

    def _metadata(self, video: Frames) -> Any:
        """Return metadata with a rate of 1, so that transformers' index / rate is the second."""
        total = len(video.times)
        return transformers.video_utils.VideoMetadata(
            total_num_frames=total, fps=1.0, frames_indices=list(video.times)
        )

    def _positions(
        self, token_ids: Tensor, grid_thw: Tensor, _out: Mapping[str, Any]
    ) -> tuple[Tensor, int]:
        return self._target.rope_index(token_ids, grid_thw, torch.zeros(len(grid_thw)))

    @cached_property
    def _processor(self) -> Any:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(self._checkpoint), local_files_only=True
        )
        values, _ = self._kind.get_processor_dict(str(self._checkpoint), local_files_only=True)
        image = transformers.Qwen2VLImageProcessorPil.from_pretrained(
            str(self._checkpoint), local_files_only=True
        )
        template = values.get("chat_template") or tokenizer.chat_template
        processor = self._kind(image_processor=image, tokenizer=tokenizer, chat_template=template)
        processor.video_processor = self._videos
        return processor

    @cached_property
    def _videos(self) -> FrameProcessor:
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

        return FrameProcessor(self._checkpoint, Qwen3VLVideoProcessor, _fits)


def _fits(processor: FrameProcessor, shape: Sequence[int]) -> bool:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    count, height, width, _ = shape
    size = smart_resize(
        num_frames=count,
        height=height,
        width=width,
        temporal_factor=processor.temporal_patch_size,
        factor=processor.factor,
        min_pixels=processor.size["shortest_edge"],
        max_pixels=processor.size["longest_edge"],
    )
    return tuple(size) == (height, width)
