"""The formats of tool calls, one file each.

To add one: a file with a ``ToolFormat`` (``format.py``), and a line in ``registry.py``.
"""

from trt_eagle3.multimodal.tool_formats.format import ToolFormat
from trt_eagle3.multimodal.tool_formats.registry import (
    TOOL_FORMATS,
    named_tool_format,
    taught_tool_format,
)

__all__ = ["TOOL_FORMATS", "ToolFormat", "named_tool_format", "taught_tool_format"]
