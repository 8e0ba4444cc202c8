"""The prompt as ``transformers`` prepares it.

Pixels follow Pillow (``Qwen2VLImageProcessorPil``), as the program does. transformers' video
processor needs torchvision; without it frames that need no resizing go through the image processor
one by one, which computes the same values, and the text and times around them are
``Qwen3VLProcessor``'s own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from trt_eagle3.parity.reference.processor import ReferenceInputs, check_transformers, decoded_text
from trt_eagle3.prompts.prompt_file import Question

__all__ = ["Qwen3VLProcessorReference"]


class Qwen3VLProcessorReference:
    """``parity.processor.ProcessorReference`` of a Qwen3-VL checkpoint.

    ``target`` knows its positions; as ``reader``, the engine's, files are decoded.
    """

    def __init__(self, checkpoint: Path, target: Qwen3VLReference, reader: Processor) -> None:
        check_transformers()
        assert reader.video_config is not None, "a processor without videos"
        self._checkpoint, self._target = checkpoint, target
        self._video_config = reader.video_config

    def __call__(self, question: Question) -> ReferenceInputs | None:
        """The inputs of ``question``; None for a video whose frames would have to be resized."""
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
                "video_metadata": [video.metadata for video in videos],
                "do_sample_frames": False,
            }
        out = self._processor(text=[text], return_tensors="pt", **media)
        token_ids = out["input_ids"][0]
        grids = [out[name] for name in ("image_grid_thw", "video_grid_thw") if name in out]
        grid_thw = torch.cat(grids) if grids else torch.empty(0, 3, dtype=torch.int64)
        positions, delta = self._target.rope_index(token_ids, grid_thw)
        patches = [out[name] for name in ("pixel_values", "pixel_values_videos") if name in out]
        config = self._target.config.vision_config
        width = config.in_channels * config.temporal_patch_size * config.patch_size**2
        return ReferenceInputs(
            token_ids=token_ids,
            position_ids=positions.int(),
            rope_delta=delta,
            patches=torch.cat(patches) if patches else torch.empty(0, width),
            grid_thw=grid_thw,
            visual_rows=out["mm_token_type_ids"][0] != 0,
        )

    def text(self, token_ids: Sequence[int]) -> str:
        """What ``transformers`` makes of the tokens of an answer, special ones left out."""
        return decoded_text(self._processor.tokenizer, token_ids)

    def _video(self, source: Any) -> _Frames:
        loaded = load_video(source, self._video_config)
        return _Frames(loaded.frames, loaded.times)

    @cached_property
    def _processor(self) -> Any:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(self._checkpoint), local_files_only=True
        )
        values, _ = transformers.Qwen3VLProcessor.get_processor_dict(
            str(self._checkpoint), local_files_only=True
        )
        image = transformers.Qwen2VLImageProcessorPil.from_pretrained(
            str(self._checkpoint), local_files_only=True
        )
        template = values.get("chat_template") or tokenizer.chat_template
        processor = _ImageTextProcessor(
            image_processor=image, tokenizer=tokenizer, chat_template=template
        )
        processor.video_processor = self._videos
        return processor

    @cached_property
    def _videos(self) -> _FrameProcessor:
        return _FrameProcessor(self._checkpoint)


@dataclass(frozen=True)
class _Frames:
    """uint8 [F, H, W, 3] and the second of each frame."""

    pixels: Tensor
    times: Sequence[float]

    @property
    def metadata(self) -> Any:
        """transformers divides indices by the rate, so that seconds at a rate of one are
        themselves.
        """
        total = len(self.times)
        return transformers.video_utils.VideoMetadata(
            total_num_frames=total, fps=1.0, frames_indices=list(self.times)
        )


class _ImageTextProcessor(transformers.Qwen3VLProcessor):  # type: ignore[misc]
    """Qwen3VLProcessor whose video processor is set afterwards."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


class _FrameProcessor:
    """Stands where Qwen3VLVideoProcessor would: frames as they are, through the image processor
    in pairs.
    """

    def __init__(self, checkpoint: Path) -> None:
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

        stored, _ = Qwen3VLVideoProcessor.get_video_processor_dict(
            str(checkpoint), local_files_only=True
        )
        names = (
            "size",
            "patch_size",
            "temporal_patch_size",
            "merge_size",
            "image_mean",
            "image_std",
            "rescale_factor",
        )
        values = {
            name: stored.get(name, getattr(Qwen3VLVideoProcessor, name, None)) for name in names
        }
        self._size = values.pop("size")
        known = {name: value for name, value in values.items() if value is not None}
        self._images = transformers.Qwen2VLImageProcessorPil(do_resize=False, **known)
        self.merge_size, self.temporal_patch_size = (
            self._images.merge_size,
            self._images.temporal_patch_size,
        )

    def fits(self, video: _Frames) -> bool:
        """Whether transformers would leave the frames at their size."""
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

        count, height, width, _ = video.pixels.shape
        size = smart_resize(
            num_frames=count,
            height=height,
            width=width,
            temporal_factor=self.temporal_patch_size,
            factor=self._images.patch_size * self.merge_size,
            min_pixels=self._size["shortest_edge"],
            max_pixels=self._size["longest_edge"],
        )
        return tuple(size) == (height, width)

    def __call__(
        self, videos: Sequence[Any], video_metadata: Sequence[Any], **_: Any
    ) -> dict[str, Any]:
        found = [self._patches(torch.as_tensor(video)) for video in videos]
        return {
            "pixel_values_videos": torch.cat([patches for patches, _ in found]),
            "video_grid_thw": torch.tensor([grid for _, grid in found]),
            "video_metadata": list(video_metadata),
        }

    def _patches(self, video: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
        """Patches of frames joined over time: each half of a temporal patch comes from the still
        of its own frame.
        """
        frames = list(video)
        temporal, patch = self.temporal_patch_size, self._images.patch_size
        frames += frames[-1:] * (-len(frames) % temporal)
        stills = [self._images(images=[frame.numpy()], return_tensors="pt") for frame in frames]
        _, height, width = stills[0]["image_grid_thw"][0].tolist()
        cut = [
            still["pixel_values"].view(height * width, 3, temporal, patch * patch)
            for still in stills
        ]
        joined = [
            torch.stack([cut[start + i][:, :, i] for i in range(temporal)], dim=2)
            for start in range(0, len(cut), temporal)
        ]
        return torch.cat(joined).flatten(1), (len(joined), height, width)
