"""Read the fields that all requests share: sampling, streaming and the model's name."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError

from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.errors import UserError, quote
from trt_eagle3.io.validation import problem_text
from trt_eagle3.serving.config import ServingConfig
from trt_eagle3.serving.errors import FieldError, RefusedError
from trt_eagle3.serving.openai.ignored import IgnoredKeys
from trt_eagle3.serving.served_model import ServedModel

__all__ = [
    "Number",
    "SamplingFields",
    "StreamOptions",
    "Whole",
    "check_model",
    "check_prompt_logprobs",
    "read_biases",
    "read_fields",
    "sampling",
]

_F = TypeVar("_F", bound=BaseModel)
_WHOLE = re.compile(r"[+-]?\d{1,40}(\.0*)?")
_NUMBER = re.compile(r"[+-]?\d{1,40}(\.\d{1,40})?([eE][+-]?\d{1,3})?")
_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "unknown": "unknown_parameter",
}


def _read_whole(value: Any) -> Any:
    """Accept ``5.0`` and ``"5"`` as whole numbers: clients send them, and vLLM accepts them."""
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        return int(value.partition(".")[0])
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _read_number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value.strip()) else value


Whole = Annotated[int, BeforeValidator(_read_whole)]
"""A whole number, also as ``5.0`` or a text."""
Number = Annotated[float, BeforeValidator(_read_number)]
"""A number, also as a text."""


class StreamOptions(BaseModel):
    """``stream_options``; ``include_acceptance`` is our own field."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = None
    include_acceptance: bool | None = None


class SamplingFields(BaseModel):
    """Sampling fields: OpenAI's first, then vLLM's and our own, then fields without effect.

    ``null`` counts as not given.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    logit_bias: dict[str, Number] = Field(default_factory=dict)
    seed: Whole | None = None
    n: Whole = 1
    stop: Annotated[list[str], FailFast()] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    top_k: Whole | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: Whole = 0
    stop_token_ids: Annotated[list[Whole], FailFast()] = Field(default_factory=list)
    ignore_eos: bool = False
    speculation: bool = True

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    request_id: Any = None
    priority: Any = None


def read_fields(
    raw: Any, model: type[_F], neutral: Mapping[str, tuple[Any, ...]], serving: ServingConfig
) -> tuple[_F, IgnoredKeys]:
    """Validate a body's fields; return them and its ignored keys.

    Later checks of nested keys add to the ignored keys.

    Args:
        neutral: unserved fields, each with the values that change nothing.
    Raises:
        FieldError: a bad value, an unserved field, or with ``strict_fields`` an unknown one.
    """
    if not isinstance(raw, Mapping):
        raise UserError(f"body: expected a JSON object, got {quote(raw, 80)}")
    given = _given(raw, neutral)
    ignored = IgnoredKeys(strict=serving.strict_fields)
    ignored.check(given, model.model_fields)
    ignored.check(given.get("stream_options"), StreamOptions.model_fields, "stream_options")
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    try:
        return model.model_validate(given), ignored
    except ValidationError as error:
        raise _problem(error.errors()[0]) from error


def _given(raw: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return the fields with a value, without neutral ones."""
    given = {name: value for name, value in raw.items() if value is not None}
    for name, values in neutral.items():
        if name not in given:
            continue
        if given[name] not in values:
            expected = " or ".join(map(repr, values)) or "nothing"
            raise FieldError(
                f"{name}: expected {expected}, got {reprlib.repr(given[name])}. Other values are "
                "not served here.",
                name,
                "unsupported_value",
            )
        del given[name]
    return given


def _problem(error: Mapping[str, Any]) -> FieldError:
    field = ".".join(str(part) for part in error["loc"]) or "body"
    got = "" if error["type"] == "missing" else f", got {reprlib.repr(error['input'])}"
    return FieldError(f"{field}: {problem_text(error)}{got}", field, _code(error["type"]))


def _code(kind: str) -> str:
    """Map a pydantic error type to OpenAI's code."""
    return _CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")


def check_model(name: str | None, served: ServedModel) -> str:
    """Return the model name for the answer.

    Raises:
        RefusedError: the request names another model.
    """
    if name is None:
        return served.names[0]
    if name not in served.names:
        expected = " or ".join(map(repr, served.names))
        raise RefusedError(
            404, f"model: expected {expected}, got {quote(name, 80)}", "model_not_found", "model"
        )
    return name


def sampling(
    fields: SamplingFields, served: ServedModel, serving: ServingConfig, max_tokens: int | None
) -> SamplingParams:
    """Make sampling parameters from ``fields``, with the model's defaults for missing ones.

    Without ``max_tokens``, the context is the only limit.

    Raises:
        UserError: a value outside its range, too many stop texts or answers.
    """
    serving.check_stop(fields.stop, fields.stop_token_ids)
    if not 1 <= fields.n <= serving.max_choices:
        raise FieldError(f"n: expected from 1 to {serving.max_choices}, got {fields.n}", "n")
    top_k = 0 if fields.top_k == -1 else fields.top_k  # -1 is vLLM's value for all tokens
    chosen: dict[str, Any] = {
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "top_k": top_k,
        "min_p": fields.min_p,
        "repetition_penalty": fields.repetition_penalty,
    }
    return replace(
        served.defaults,
        **{name: value for name, value in chosen.items() if value is not None},
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        logit_bias=read_biases(fields.logit_bias),
        seed=_seed(fields.seed),
        max_tokens=served.max_seq_len if max_tokens is None else max_tokens,
        min_tokens=fields.min_tokens,
        stop=fields.stop,
        stop_token_ids=fields.stop_token_ids,
        ignore_eos=fields.ignore_eos,
    )


def check_prompt_logprobs(prompt_logprobs: int | None, *, stream: bool) -> None:
    """Refuse ``prompt_logprobs`` of an answer that is streamed, as vLLM does.

    Raises:
        FieldError: both are given.
    """
    if prompt_logprobs is not None and stream:
        raise FieldError(
            "prompt_logprobs: not served with stream: true. Leave one of them out.",
            "prompt_logprobs",
        )


def _seed(seed: int | None) -> int | None:
    """Read a negative seed as unsigned: OpenAI's seeds are signed, ours are not."""
    return seed + 2**64 if seed is not None and -(2**63) <= seed < 0 else seed


def read_biases(raw: Mapping[str, Any]) -> dict[int, Any]:
    """Read ``logit_bias``, whose token ids are texts, because JSON names are."""
    for name in raw:
        if not name.isascii() or not name.isdigit() or len(name) > 10:
            raise FieldError(
                f"logit_bias: expected token ids as keys, got {quote(name, 40)}", "logit_bias"
            )
    return {int(name): bias for name, bias in raw.items()}
