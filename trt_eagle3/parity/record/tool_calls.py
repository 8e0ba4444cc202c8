"""Tools that the answers of a validation must call, and the options that require the calls."""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import Tokenizer

from trt_eagle3.decode.request.conversation import Conversation
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.multimodal.assistant_message import AnswerFormat
from trt_eagle3.multimodal.text_encoder import TextEncoder
from trt_eagle3.multimodal.tool_formats import ToolFormat
from trt_eagle3.multimodal.tools import Tool

__all__ = ["NAMED_TOOL", "TOOLS", "tool_sets"]

TOOLS = (
    Tool(
        "light",
        parameters={
            "type": "object",
            "properties": {"room": {"enum": ["hall", 'the "loft"']}, "on": {"type": "boolean"}},
            "required": ["room", "on"],
            "additionalProperties": False,
        },
    ),
    Tool(
        "wait",
        parameters={
            "type": "object",
            "properties": {"minutes": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["minutes"],
            "additionalProperties": False,
        },
    ),
)
NAMED_TOOL = "wait"
_MAX_TOKENS = 96  # enough for a call in JSON with any tokenizer, and in XML with real ones
_BLANKS = (" ", "  ", "    ", "\t", "\n", "\n\n", "\r", "\r\n")


def tool_sets(tokenizer: Tokenizer, tool_format: ToolFormat) -> Mapping[str, SamplingParams]:
    """By name: any tools, in one or several calls; the named tool, in one call.

    Blanks are suppressed: a model that was not trained on tools would fill JSON with them.
    """
    encoder = TextEncoder.of(tokenizer)
    encoded = [encoder.encode(text, add_special_tokens=False) for text in _BLANKS]
    bias = {ids[0]: -100.0 for ids in encoded if len(ids) == 1}
    sampling = SamplingParams(max_tokens=_MAX_TOKENS, logit_bias=bias)
    answers = AnswerFormat(tools=tool_format)
    choices = {"tools": "required", "named tool": NAMED_TOOL}
    return {
        name: Conversation((), TOOLS, choice).constrained(sampling, answers)
        for name, choice in choices.items()
    }
