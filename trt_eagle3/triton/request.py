"""Convert an inference request's tensors and parameters to an engine ``Request``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trt_eagle3.decode.request.request import Request
from trt_eagle3.errors import UserError, quote
from trt_eagle3.multimodal.assistant_message import MessageParser
from trt_eagle3.serving import ServingConfig
from trt_eagle3.serving.errors import nearest
from trt_eagle3.serving.json_reader import TooLargeError, parse_request_json
from trt_eagle3.serving.served_model import ServedModel
from trt_eagle3.triton.options import constrained, read_asked
from trt_eagle3.triton.tensors import INPUTS

__all__ = ["ParsedRequest", "read_order"]

_TRITON_PREFIX = "triton_"  # request parameters of the server itself
_TRITON_NAMES = frozenset({"id", "binary_data_output", "priority", "timeout", "sequence_id"})
_TEXTS = frozenset({"text_input", "stop_words"})
_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "seed",
    "max_tokens",
    "ignore_eos",
    "frequency_penalty",
    "min_tokens",
    "logprobs",
)


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed inference request.

    Attributes:
        stream: one response per chunk, else a single response.
        echo: the text before the answer: the prompt, or nothing.
        return_token_ids: whether responses have ``token_ids``.
        parser: parses an answer to messages, and the last response then has ``message``.
    """

    request: Request
    stream: bool
    echo: str
    return_token_ids: bool
    parser: MessageParser | None = None


def read_order(
    tensors: Mapping[str, Any],
    parameters: Mapping[str, Any],
    serving: ServingConfig,
    served: ServedModel,
) -> ParsedRequest:
    """Read an inference request.

    Args:
        tensors: numpy arrays by the name of a given input; strings as bytes objects.
        parameters: the request's parameters. HTTP's ``generate`` makes one of each JSON key without
            an input.
    Raises:
        UserError: no prompt or two, text that is not UTF-8, too long a prompt, too many stop words,
            an unknown parameter, or a value that ``decode.request.request.Request`` refuses.
    """
    _refuse_unknown(parameters)
    _check_sizes(tensors, serving)
    values = {name: _READERS[INPUTS[name].data_type](tensors[name], name) for name in tensors}
    single = {
        name: value[0] for name, value in values.items() if INPUTS[name].length == 1 and value
    }
    asked = read_asked(single, serving, served)
    stop, stop_token_ids = (
        tuple(values.get("stop_words", ())),
        tuple(values.get("stop_token_ids", ())),
    )
    serving.check_stop(stop, stop_token_ids)
    given = {name: single[name] for name in _SAMPLING if name in single}
    sampling = replace(served.defaults, **given, stop=stop, stop_token_ids=stop_token_ids)
    request = Request(
        prompt=asked.prompt,
        images=(*values.get("image_url", ()), *values.get("image_bytes", ())),
        videos=(
            *(_video(text, serving) for text in values.get("video", ())),
            *values.get("video_bytes", ()),
        ),
        sampling=constrained(sampling, asked, single, serving),
        speculation=single.get("speculation", True),
    )
    echo = "" if single.get("exclude_input_in_output", True) else single.get("text_input", "")
    return ParsedRequest(
        request,
        single.get("stream", False),
        echo,
        single.get("return_token_ids", False),
        asked.parser,
    )


def _refuse_unknown(parameters: Mapping[str, Any]) -> None:
    # names with a hyphen are HTTP headers that the operator forwards
    unknown = [
        name
        for name in parameters
        if name not in _TRITON_NAMES and not name.startswith(_TRITON_PREFIX) and "-" not in name
    ]
    if unknown:
        likely = nearest(unknown[0], INPUTS)
        raise UserError(f"request: unknown input {quote(unknown[0], 80)}. {likely}")


def _check_sizes(tensors: Mapping[str, Any], serving: ServingConfig) -> None:
    """Refuse inputs that are too long, before they are read."""
    for name, array in tensors.items():
        if array.size > serving.max_json_values:
            raise TooLargeError(
                f"{name}: {array.size} values, the limit is {serving.max_json_values}. Send fewer."
            )
    texts = [
        value for name in _TEXTS & tensors.keys() for value in np.asarray(tensors[name]).reshape(-1)
    ]
    count = sum(map(len, texts))
    if count > serving.max_text_bytes:
        raise TooLargeError(
            f"text: {count} bytes, the limit is {serving.max_text_bytes}. Shorten it."
        )


def _strings(array: Any, name: str) -> list[Any]:
    raw = [bytes(value) for value in np.asarray(array, dtype=object).reshape(-1)]
    return raw if name.endswith("_bytes") else [_text(value, name) for value in raw]


def _text(value: bytes, name: str) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 at byte {error.start}. Encode it as UTF-8.") from error


def _numbers(array: Any, name: str) -> list[Any]:
    del name
    return list(np.asarray(array).reshape(-1).tolist())


_READERS: Mapping[str, Callable[[Any, str], list[Any]]] = {
    "TYPE_STRING": _strings,
    "TYPE_INT32": _numbers,
    "TYPE_UINT64": _numbers,
    "TYPE_FP32": _numbers,
    "TYPE_BOOL": _numbers,
}


def _video(text: str, serving: ServingConfig) -> Any:
    """Read a data URI or URL of a file, or a JSON list of frames."""
    if not text.lstrip().startswith("["):
        return text
    frames = parse_request_json(text.encode(), "video", serving)
    if not all(isinstance(frame, str) for frame in frames):
        raise UserError("video: expected a JSON list of data URIs, got other values in it.")
    return frames
