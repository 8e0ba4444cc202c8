"""Serve ``/tokenize`` and ``/detokenize``, as vLLM does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field

from trt_eagle3.decode.request.conversation import RawPrompt
from trt_eagle3.decode.request.request import PromptSource
from trt_eagle3.errors import UserError, quote
from trt_eagle3.serving.config import ServingConfig
from trt_eagle3.serving.errors import FieldError, with_param
from trt_eagle3.serving.openai.fields import Whole, check_model, read_fields
from trt_eagle3.serving.openai.known_keys import (
    check_message_keys,
    check_option_keys,
    check_part_keys,
    check_tool_keys,
)
from trt_eagle3.serving.openai.messages import read_conversation, template_options
from trt_eagle3.serving.openai.repairs import Repairs
from trt_eagle3.serving.served_model import ServedModel

__all__ = [
    "DetokenizeFields",
    "TokenizeCall",
    "TokenizeFields",
    "detokenize",
    "read_tokenize",
    "tokenize_error",
    "tokens_object",
]


class TokenizeFields(BaseModel):
    """The body of ``POST /tokenize``: ``prompt`` or ``messages``."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    return_token_strs: bool = False
    add_special_tokens: bool = True


class DetokenizeFields(BaseModel):
    """The body of ``POST /detokenize``."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    tokens: Annotated[list[Whole], FailFast()]


def tokenize_error(error: UserError) -> UserError:
    """Attach the request field that ``error`` is about."""
    return with_param(error, TokenizeFields.model_fields, {"text": "prompt"})


@dataclass(frozen=True)
class TokenizeCall:
    """A body of ``POST /tokenize``.

    Attributes:
        texts: whether to return the tokens' texts. ignored, repaired: as in ``Call``.
    """

    prompt: PromptSource
    texts: bool
    ignored: tuple[str, ...]
    repaired: tuple[str, ...]


def read_tokenize(raw: Any, served: ServedModel, serving: ServingConfig) -> TokenizeCall:
    """Validate a body of ``POST /tokenize``.

    Raises:
        UserError: neither a prompt nor messages, or both; an error in them.
        RefusedError: the body names another model.
    """
    fields, ignored = read_fields(raw, TokenizeFields, {}, serving)
    check_model(fields.model, served)
    if (fields.prompt is None) == (fields.messages is None):
        got = "neither" if fields.prompt is None else "both"
        raise FieldError(f"prompt: expected prompt or messages, got {got}.", "prompt")
    template = served.processor.template
    repairs = Repairs(text_arguments=served.processor.text_arguments)
    prompt: PromptSource
    if fields.messages is None:
        assert fields.prompt is not None
        serving.check_prompt(fields.prompt)
        prompt = RawPrompt(fields.prompt)
    else:
        repairs.check_messages(fields.messages)
        check_message_keys(fields.messages, ignored, template.reads_of_messages)
        check_part_keys(fields.messages, ignored, served.processor, "messages")
        check_tool_keys(fields.tools, ignored)
        check_option_keys(fields.chat_template_kwargs, ignored, template.takes_option)
        options = template_options(fields.chat_template_kwargs, None)
        prompt = read_conversation(
            fields.messages,
            fields.tools,
            None,
            serving,
            options=options,
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
        )
    return TokenizeCall(prompt, fields.return_token_strs, ignored.paths, repairs.paths)


def tokens_object(ids: list[int], served: ServedModel, *, texts: bool) -> dict[str, Any]:
    """Build the response of ``POST /tokenize``."""
    strings = [served.token_bytes(i).decode("utf-8", "replace") for i in ids] if texts else None
    return {
        "count": len(ids),
        "max_model_len": served.max_seq_len,
        "tokens": ids,
        "token_strs": strings,
    }


def detokenize(
    raw: Any, served: ServedModel, serving: ServingConfig
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the response of ``POST /detokenize``, including special tokens, and the ignored keys.

    Raises:
        UserError: an id that the tokenizer lacks.
        RefusedError: the body names another model.
    """
    fields, ignored = read_fields(raw, DetokenizeFields, {}, serving)
    check_model(fields.model, served)
    tokenizer = served.processor.tokenizer
    for token_id in fields.tokens:
        if not 0 <= token_id < 2**31 or tokenizer.id_to_token(token_id) is None:
            raise FieldError(f"tokens: {quote(token_id, 40)}: no id of the tokenizer.", "tokens")
    text = tokenizer.decode(fields.tokens, skip_special_tokens=False)
    return {"prompt": text}, ignored.paths
