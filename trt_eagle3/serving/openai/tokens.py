"""``/tokenize`` and ``/detokenize``, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field

from trt_eagle3.decode.conversation import RawPrompt
from trt_eagle3.decode.request import PromptSource
from trt_eagle3.errors import UserError
from trt_eagle3.serving.config import ServingConfig
from trt_eagle3.serving.errors import FieldError, with_param
from trt_eagle3.serving.openai.fields import check_model, read_fields
from trt_eagle3.serving.openai.messages import read_conversation, read_part_keys, template_options
from trt_eagle3.serving.served_model import ServedModel

__all__ = ["detokenize", "read_tokenize", "tokenize_error", "tokens_object"]


class _TokenizeFields(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class _DetokenizeFields(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    tokens: Annotated[list[int], FailFast()]


def tokenize_error(error: UserError) -> UserError:
    """``error`` with the field that it is about."""
    return with_param(error, _TokenizeFields.model_fields, {"text": "prompt"})


def read_tokenize(
    raw: Any, served: ServedModel, serving: ServingConfig
) -> tuple[PromptSource, bool]:
    """The prompt of ``POST /tokenize``, and whether the tokens' texts are wanted.

    Raises:
        UserError: neither a prompt nor messages, or both; what is wrong with them.
        RefusedError: another model is asked for.
    """
    fields, _ = read_fields(raw, _TokenizeFields, {"continue_final_message": (False,)}, serving)
    check_model(fields.model, served)
    if (fields.prompt is None) == (fields.messages is None):
        got = "neither" if fields.prompt is None else "both"
        raise FieldError(f"prompt: expected prompt or messages, got {got}.", "prompt")
    if fields.messages is None:
        assert fields.prompt is not None
        serving.check_prompt(fields.prompt)
        return RawPrompt(fields.prompt), fields.return_token_strs
    read_part_keys(fields.messages, "messages", served, serving)
    options = template_options(fields.chat_template_kwargs, None)
    conversation = read_conversation(fields.messages, fields.tools, None, serving, options=options)
    return conversation, fields.return_token_strs


def tokens_object(ids: list[int], served: ServedModel, *, texts: bool) -> dict[str, Any]:
    """The answer of ``POST /tokenize``."""
    strings = [served.token_bytes(i).decode("utf-8", "replace") for i in ids] if texts else None
    return {
        "count": len(ids),
        "max_model_len": served.max_seq_len,
        "tokens": ids,
        "token_strs": strings,
    }


def detokenize(raw: Any, served: ServedModel, serving: ServingConfig) -> dict[str, Any]:
    """The answer of ``POST /detokenize``: special tokens are written out.

    Raises:
        UserError: an id that the tokenizer lacks.
        RefusedError: another model is asked for.
    """
    fields, _ = read_fields(raw, _DetokenizeFields, {}, serving)
    check_model(fields.model, served)
    tokenizer = served.processor.tokenizer
    for token_id in fields.tokens:
        if not 0 <= token_id < 2**31 or tokenizer.id_to_token(token_id) is None:
            raise FieldError(f"tokens: {token_id:.40g}: no id of the tokenizer.", "tokens")
    return {"prompt": tokenizer.decode(fields.tokens, skip_special_tokens=False)}
