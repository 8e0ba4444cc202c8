"""The arguments of ``LLM.generate`` as requests: one, or one for each prompt of a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from trt_eagle3.decode.request.request import PromptSource, Request
from trt_eagle3.decode.sampling.sampling_params import SamplingOptions, SamplingParams
from trt_eagle3.errors import UserError
from trt_eagle3.multimodal import ImageSource, VideoSource

__all__ = ["Images", "Videos", "is_one_prompt", "one_request", "requests_of"]

Images = Sequence[ImageSource] | None
Videos = Sequence[VideoSource] | None


def is_one_prompt(prompt: object) -> TypeGuard[PromptSource]:
    """Whether ``prompt`` is a text or a conversation, and no list of them."""
    if not isinstance(prompt, list | tuple):
        return True
    return all(isinstance(part, Mapping) for part in prompt)


def one_request(
    prompt: PromptSource,
    images: Any,
    videos: Any,
    sampling: SamplingParams | Sequence[SamplingParams],
    speculation: bool,
    options: SamplingOptions,
) -> Request:
    """The request of one prompt; what is wrong with a value, ``Request`` says.

    Raises:
        UserError: a value of another type or outside its range, by name.
    """
    if not isinstance(sampling, SamplingParams):
        raise UserError(f"sampling: expected SamplingParams, got {type(sampling).__name__}")
    return Request(prompt, images, videos, sampling.updated(**options), speculation)


def requests_of(
    prompts: Sequence[PromptSource],
    images: Any,
    videos: Any,
    sampling: SamplingParams | Sequence[SamplingParams],
    speculation: bool,
    options: SamplingOptions,
) -> list[Request]:
    """A request for each of ``prompts``; images, videos and sampling are shared out among them.

    Raises:
        UserError: as for one; a list with more or fewer entries than there are prompts.
    """
    each = zip(
        prompts,
        _for_each("images", images, len(prompts)),
        _for_each("videos", videos, len(prompts)),
        _samplings(sampling, len(prompts)),
        strict=True,
    )
    return [
        one_request(prompt, _images(its_images), its_videos, its, speculation, options)
        for prompt, its_images, its_videos, its in each
    ]


def _samplings(
    sampling: SamplingParams | Sequence[SamplingParams], count: int
) -> Sequence[SamplingParams]:
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    return _for_each("sampling", sampling, count)


def _for_each(name: str, values: Any, count: int) -> Sequence[Any]:
    """``values``, one for each of ``count`` prompts; None for each where there are none."""
    if values is None:
        return [None] * count
    if not isinstance(values, list | tuple):
        raise UserError(
            f"{name}: expected a list with an entry for each of {count} prompts, got "
            f"{type(values).__name__}"
        )
    if len(values) != count:
        raise UserError(
            f"{name}: expected an entry for each of {count} prompts, got {len(values)}. Put None "
            "where a prompt has none."
        )
    return values


def _images(value: Any) -> Any:
    """Those of one prompt: a single image stands for a list of one (a list may be a video)."""
    return value if value is None or isinstance(value, list | tuple) else [value]
