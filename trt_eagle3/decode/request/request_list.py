"""Convert the arguments of ``LLM.generate`` to requests: one, or one per prompt of a list."""

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
    """Return whether ``prompt`` is a text or a conversation, not a list of them."""
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
    """Make the request of one prompt; ``Request`` checks the values.

    Raises:
        UserError: a value is of another type or outside its range; names the field.
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
    """Make a request for each of ``prompts``.

    Images, videos and sampling have one entry per prompt. A single ``SamplingParams`` is used for
    all prompts.

    Raises:
        UserError: as for ``one_request``, or a list has another number of entries than ``prompts``.
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
    """Check that ``values`` has one entry per prompt; None becomes a list of None."""
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
    """Return the images of one prompt as a list; a single image becomes a list of one."""
    return value if value is None or isinstance(value, list | tuple) else [value]
