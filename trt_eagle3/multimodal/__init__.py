"""Prompts of text, images and videos to model inputs; no torchvision, no model code."""

from trt_eagle3.multimodal.image import ImageSource, load_image
from trt_eagle3.multimodal.policy import LOCAL_MEDIA, MediaPolicy
from trt_eagle3.multimodal.processor import ModelInputs, Processor, copy_processor_files
from trt_eagle3.multimodal.spec import ProcessorSpec
from trt_eagle3.multimodal.tokenizer import StreamDecoder
from trt_eagle3.multimodal.video import Video, VideoSource, load_video

__all__ = [
    "LOCAL_MEDIA",
    "ImageSource",
    "MediaPolicy",
    "ModelInputs",
    "Processor",
    "ProcessorSpec",
    "StreamDecoder",
    "Video",
    "VideoSource",
    "copy_processor_files",
    "load_image",
    "load_video",
]
