"""Reasoning: whether an answer begins with reasoning, and the marks that enclose it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

__all__ = ["NO_REASONING", "Reasoning", "ReasoningMode", "reasoning_marks"]

ReasoningMode = Literal["none", "optional", "open"]
"""Whether an answer may begin with reasoning (optional), or begins inside it (open)."""

# <think>, <thinking>, <seed:think>, [THINK], and their closing marks
_MARK = re.compile(
    r"([<\[\u25c1])/?((?:\w+:)?(?:think|thinking|thought|reason|reasoning))([>\]\u25b7])",
    re.IGNORECASE,
)
_CLOSING = {"<": ">", "[": "]", "\u25c1": "\u25b7"}


@dataclass(frozen=True)
class Reasoning:
    """How answers contain reasoning. ``start``, ``end``: the marks that enclose it."""

    mode: ReasoningMode = "none"
    start: str = "<think>"
    end: str = "</think>"


NO_REASONING = Reasoning()


def reasoning_marks(template: str) -> list[tuple[str, str]]:
    """Find pairs of reasoning marks in the source of a chat template, ``<think>`` first."""
    found = {
        (f"{left}{name}{right}", f"{left}/{name}{right}")
        for left, name, right in _MARK.findall(template)
        if right == _CLOSING[left]
    }
    return sorted(found, key=lambda marks: (marks[0] != "<think>", marks))
