"""Answers parsed in pieces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from trt_eagle3.multimodal.assistant_message import AnswerFormat, AssistantMessage, MessageParser
from trt_eagle3.multimodal.tools import Tool

__all__ = ["parse_pieces"]


def parse_pieces(
    text: str, cuts: Sequence[int], tools: Sequence[Tool], answer_format: AnswerFormat
) -> AssistantMessage:
    """The sum of the deltas of ``text``, cut at ``cuts``."""
    parser, found = MessageParser(tools, answer_format), AssistantMessage()
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for start, stop in itertools.pairwise(bounds):
        found.add(parser.push(text[start:stop]))
    found.add(parser.flush())
    assert found == parser.message
    return found
