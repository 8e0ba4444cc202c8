"""The arguments of ``LLM.generate`` as requests: one, or one for each prompt of a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from trt_eagle3.decode.request.request import PromptSource, Request
from trt_eagle3.decode.sampling.sampling_params import (
    GREEDY,
    SamplingOptions,
    SamplingParams,
    check_options,
)
from trt_eagle3.errors import UserError
from trt_eagle3.multimodal import ImageSource, VideoSource

__all__ = [
    "Images",
    "Sampling",
    "Videos",
    "chosen_sampling",
    "is_one_prompt",
    "one_request",
    "requests_of",
]

Images = Sequence[ImageSource] | ImageSource | None
Videos = Sequence[VideoSource] | VideoSource | None
Sampling = SamplingParams | Sequence[SamplingParams]
_OTHERS = ("images", "videos", "sampling_params", "speculation")  # arguments that are no fields


def chosen_sampling(sampling: Sampling | None, sampling_params: Sampling | None) -> Sampling:
    """Return the given one of two names for the same argument; greedy if neither is given.

    Raises:
        UserError: both are given.
    """
    if sampling is not None and sampling_params is not None:
        raise UserError("sampling_params: given twice, also as sampling. Leave one of them out.")
    given = sampling_params if sampling is None else sampling
    return GREEDY if given is None else given


def is_one_prompt(prompt: object) -> TypeGuard[PromptSource]:
    """Whether ``prompt`` is a text or a conversation, and no list of them."""
    if not isinstance(prompt, list | tuple):
        return True
    return all(isinstance(part, Mapping) for part in prompt)


def one_request(
    prompt: PromptSource,
    images: Any,
    videos: Any,
    sampling: Sampling,
    speculation: bool,
    options: SamplingOptions,
) -> Request:
    """The request of one prompt; what is wrong with a value, ``Request`` says.

    Raises:
        UserError: a value of another type or outside its range, by name.
    """
    check_options(options, _OTHERS)
    if not isinstance(sampling, SamplingParams):
        raise UserError(f"sampling: expected SamplingParams, got {type(sampling).__name__}")
    return Request(prompt, images, videos, sampling.updated(**options), speculation)


def requests_of(
    prompts: Sequence[PromptSource],
    images: Any,
    videos: Any,
    sampling: Sampling,
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
        one_request(prompt, its_images, its_videos, its, speculation, options)
        for prompt, its_images, its_videos, its in each
    ]


def _samplings(sampling: Sampling, count: int) -> Sequence[SamplingParams]:
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
