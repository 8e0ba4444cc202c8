"""Convert the arguments of ``LLM.generate`` to requests: one, or one per prompt of a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard, cast

from trt_eagle3.decode.request.conversation import RawPrompt
from trt_eagle3.decode.request.request import PromptInput, PromptSource, Request
from trt_eagle3.decode.sampling.sampling_params import (
    GREEDY,
    SamplingOptions,
    SamplingParams,
    check_options,
)
from trt_eagle3.errors import UserError, quote
from trt_eagle3.multimodal import ImageSource, VideoSource

__all__ = [
    "Images",
    "Sampling",
    "Videos",
    "chosen_sampling",
    "is_one_prompt",
    "one_request",
    "repeated",
    "requests_of",
]

Images = Sequence[ImageSource] | ImageSource | None
Videos = Sequence[VideoSource] | VideoSource | None
Sampling = SamplingParams | Sequence[SamplingParams]
_TOKEN_IDS = "prompt_token_ids"  # as vLLM names them
_OTHERS = (
    "n",
    "images",
    "videos",
    "sampling_params",
    "speculation",
)  # other options


def chosen_sampling(sampling: Sampling | None, sampling_params: Sampling | None) -> Sampling:
    """Return the given one of two names for the same argument; greedy if neither is given.

    Raises:
        UserError: both are given.
    """
    if sampling is not None and sampling_params is not None:
        raise UserError("sampling_params: given twice, also as sampling. Leave one of them out.")
    given = sampling_params if sampling is None else sampling
    return GREEDY if given is None else given


def is_one_prompt(prompt: object) -> TypeGuard[PromptInput]:
    """Return whether ``prompt`` is a text, a conversation or token ids, not a list of them."""
    if not isinstance(prompt, list | tuple):
        return True
    if not prompt:
        return False  # a list of no prompts
    if all(isinstance(part, Mapping) for part in prompt):
        return not all(_TOKEN_IDS in part for part in prompt)
    return isinstance(prompt[0], int)


def as_prompt(prompt: PromptInput) -> PromptSource:
    """Return token ids as a ``RawPrompt``, and other prompts unchanged.

    Raises:
        UserError: ids that are not whole numbers, or a mapping with other keys.
    """
    if isinstance(prompt, Mapping):
        if prompt.keys() != {_TOKEN_IDS}:
            fix = "Put a chat message into a list."
            if "prompt" in prompt:
                fix = "Give the text alone, and images and videos as images= and videos=."
            raise UserError(
                f"prompt: expected a mapping with {_TOKEN_IDS} alone, got "
                f"{quote(list(prompt), 80)}. {fix}"
            )
        ids = prompt[_TOKEN_IDS]
        if not isinstance(ids, list | tuple):
            raise UserError(f"{_TOKEN_IDS}: expected a list, got {type(ids).__name__}")
    elif isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], int):
        ids = prompt
    else:
        return cast(PromptSource, prompt)
    for token in ids:
        if type(token) is not int or not 0 <= token < 2**31:
            raise UserError(f"prompt: expected token ids, got {quote(token, 40)} among them")
    return RawPrompt(tuple(ids))


def one_request(
    prompt: PromptInput,
    images: Any,
    videos: Any,
    sampling: Sampling,
    speculation: bool,
    options: SamplingOptions,
) -> Request:
    """Make the request of one prompt; ``Request`` checks the values.

    Raises:
        UserError: a value is of another type or outside its range; names the field.
    """
    check_options(options, _OTHERS)
    if not isinstance(sampling, SamplingParams):
        raise UserError(f"sampling: expected SamplingParams, got {type(sampling).__name__}")
    return Request(as_prompt(prompt), images, videos, sampling.updated(**options), speculation)


def requests_of(
    prompts: Sequence[PromptInput],
    images: Any,
    videos: Any,
    sampling: Sampling,
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
        one_request(prompt, its_images, its_videos, its, speculation, options)
        for prompt, its_images, its_videos, its in each
    ]


def repeated(request: Request, n: int) -> tuple[Request, ...]:
    """Repeat ``request`` for ``n`` answers, each with its own random seed.

    Only the first one gets the log-probabilities of the prompt.

    Raises:
        UserError: ``n`` is not a whole number of at least 1.
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise UserError(f"n: expected a whole number of at least 1, got {quote(n, 40)}")
    seed = request.sampling.seed
    if seed is None and request.sampling.prompt_logprobs is None:
        return (request,) * n
    others = [
        request.sampling.updated(
            seed=None if seed is None else (seed + i) % 2**64, prompt_logprobs=None
        )
        for i in range(1, n)
    ]
    return (request, *(replace(request, sampling=other) for other in others))


def _samplings(sampling: Sampling, count: int) -> Sequence[SamplingParams]:
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
