"""Tools that the answers of a validation must call, and how those are asked for."""

from __future__ import annotations

from collections.abc import Mapping

from trt_eagle3.decode.conversation import Conversation
from trt_eagle3.decode.sampling_params import SamplingParams
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
# a call of either has fewer, of any tokenizer; penalties keep a model without tools from blanks
_SAMPLING = SamplingParams(max_tokens=100, frequency_penalty=2.0)


def tool_sets() -> Mapping[str, SamplingParams]:
    """By name: any of the tools, several calls if it likes; the named one, once."""
    choices = {"tools": "required", "named tool": NAMED_TOOL}
    return {
        name: Conversation((), TOOLS, choice).constrained(_SAMPLING, "none")
        for name, choice in choices.items()
    }
