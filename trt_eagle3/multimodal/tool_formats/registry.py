"""The tool call formats by name, and the detection of one in a chat template."""

from __future__ import annotations

from collections.abc import Mapping

from trt_eagle3.errors import UserError, quote
from trt_eagle3.multimodal.tool_formats.format import ToolFormat
from trt_eagle3.multimodal.tool_formats.hermes import HERMES
from trt_eagle3.multimodal.tool_formats.llama3_json import LLAMA3_JSON
from trt_eagle3.multimodal.tool_formats.qwen3_xml import QWEN3_XML

__all__ = ["TOOL_FORMATS", "named_tool_format", "taught_tool_format"]

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": HERMES,
    "qwen3_xml": QWEN3_XML,
    "qwen3_coder": QWEN3_XML,
    "llama3_json": LLAMA3_JSON,
    "llama3": LLAMA3_JSON,
}
"""Names of vLLM (all but the last) and of SGLang (``hermes``, ``qwen3_coder``, ``llama3``)."""


def named_tool_format(name: str) -> ToolFormat:
    """Return the format ``name``.

    Raises:
        UserError: no format has that name.
    """
    if name not in TOOL_FORMATS:
        raise UserError(
            f"tool_format: expected auto, {', '.join(TOOL_FORMATS)}, got {quote(name, 40)}"
        )
    return TOOL_FORMATS[name]


def taught_tool_format(text: str) -> ToolFormat:
    """Return the format that a prompt or a chat template teaches; Hermes' if it teaches none."""
    return next((known for known in TOOL_FORMATS.values() if known.is_taught(text)), HERMES)
