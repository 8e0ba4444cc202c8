"""Define the model's inputs and outputs. Names are TensorRT-LLM's where it has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["INPUTS", "OUTPUTS", "Tensor"]


@dataclass(frozen=True)
class Tensor:
    """A tensor of the model: Triton's data type, and its length (-1: any number)."""

    data_type: str
    length: int = 1


INPUTS: Mapping[str, Tensor] = {
    "text_input": Tensor("TYPE_STRING"),
    "messages": Tensor("TYPE_STRING"),
    "max_tokens": Tensor("TYPE_INT32"),
    "stream": Tensor("TYPE_BOOL"),
    "temperature": Tensor("TYPE_FP32"),
    "top_k": Tensor("TYPE_INT32"),
    "top_p": Tensor("TYPE_FP32"),
    "min_p": Tensor("TYPE_FP32"),
    "repetition_penalty": Tensor("TYPE_FP32"),
    "presence_penalty": Tensor("TYPE_FP32"),
    "frequency_penalty": Tensor("TYPE_FP32"),
    "logit_bias": Tensor("TYPE_STRING"),
    "seed": Tensor("TYPE_UINT64"),
    "stop_words": Tensor("TYPE_STRING", -1),
    "stop_token_ids": Tensor("TYPE_INT32", -1),
    "ignore_eos": Tensor("TYPE_BOOL"),
    "min_tokens": Tensor("TYPE_INT32"),
    "logprobs": Tensor("TYPE_INT32"),
    "tools": Tensor("TYPE_STRING"),
    "tool_choice": Tensor("TYPE_STRING"),
    "parallel_tool_calls": Tensor("TYPE_BOOL"),
    "chat_template_kwargs": Tensor("TYPE_STRING"),
    "response_format": Tensor("TYPE_STRING"),
    "structured_outputs": Tensor("TYPE_STRING"),
    "speculation": Tensor("TYPE_BOOL"),
    "image_url": Tensor("TYPE_STRING", -1),
    "image_bytes": Tensor("TYPE_STRING", -1),
    "video": Tensor("TYPE_STRING", -1),
    "video_bytes": Tensor("TYPE_STRING", -1),
    "exclude_input_in_output": Tensor("TYPE_BOOL"),
    "return_token_ids": Tensor("TYPE_BOOL"),
}
"""All are optional, but exactly one of text_input and messages is required."""

OUTPUTS: Mapping[str, Tensor] = {
    "text_output": Tensor("TYPE_STRING"),
    "finish_reason": Tensor("TYPE_STRING"),
    "num_input_tokens": Tensor("TYPE_INT32"),
    "num_output_tokens": Tensor("TYPE_INT32"),
    "acceptance_length": Tensor("TYPE_FP32"),
    "token_ids": Tensor("TYPE_INT32", -1),
    "logprobs": Tensor("TYPE_STRING"),
    "message": Tensor("TYPE_STRING"),
}
"""Every response of a stream has text_output; token_ids and logprobs only on request.

The last response has the rest.
"""
