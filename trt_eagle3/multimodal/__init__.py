"""Convert prompts of text, images and videos to model inputs, without torchvision or model code."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trt_eagle3.multimodal.image import ImageSource, load_image
    from trt_eagle3.multimodal.policy import LOCAL_MEDIA, MediaPolicy
    from trt_eagle3.multimodal.prepared import PixelPatches, normalise
    from trt_eagle3.multimodal.processor import ModelInputs, Processor
    from trt_eagle3.multimodal.processor_files import copy_processor_files
    from trt_eagle3.multimodal.tokenizer import StreamDecoder
    from trt_eagle3.multimodal.video import Video, VideoSource, load_video

__all__ = [
    "LOCAL_MEDIA",
    "ImageSource",
    "MediaPolicy",
    "ModelInputs",
    "PixelPatches",
    "Processor",
    "StreamDecoder",
    "Video",
    "VideoSource",
    "copy_processor_files",
    "load_image",
    "load_video",
    "normalise",
]

# Imported on first use: a decoder process imports `image` and `patches`, without torch and without
# a tokenizer.
_HOMES = {
    "LOCAL_MEDIA": "policy",
    "ImageSource": "image",
    "MediaPolicy": "policy",
    "ModelInputs": "processor",
    "PixelPatches": "prepared",
    "Processor": "processor",
    "StreamDecoder": "tokenizer",
    "Video": "video",
    "VideoSource": "video",
    "copy_processor_files": "processor_files",
    "load_image": "image",
    "load_video": "video",
    "normalise": "prepared",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
