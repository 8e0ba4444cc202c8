"""ModulePatterns: match the module name patterns of quantisation configs in linear time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import re2

from trt_eagle3.checkpoint.quantised.claim import Claim
from trt_eagle3.errors import UserError, clip

__all__ = ["ModulePatterns"]

_REGEX = "re:"
_MAX_REGEX_LEN = 2000  # compile time grows faster than the length
_MAX_REGEX_SIZE = 20_000  # instructions in all; each costs up to 0.2 us per name
_MAX_GLOBS, _MAX_GLOB_LEN = 2000, 500
_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
_OPTIONS.never_capture = True
_OPTIONS.max_mem = 1 << 20
_OTHERWISE = re.compile(r"\{,\d*\}|\{\d*,?\d{9,}|\[:\^?\w+:\]")
"""Syntax with another meaning in RE2 than in Python's ``re``, which producers use."""
_MISSING = {
    "(?=": "lookahead",
    "(?!": "lookahead",
    "(?<": "lookbehind",
    "(?P": "backreferences",
    "(?>": "atomic groups",
    "(?(": "conditions",
}


class ModulePatterns:
    """Patterns that select modules.

    A pattern is a name, some consecutive parts of a dotted name, a glob, or ``re:`` and a regular
    expression that matches from the start of the name.
    """

    def __init__(self, patterns: Iterable[str], claim: Claim) -> None:
        """Compile ``patterns``.

        Raises:
            UserError: a regular expression is invalid or not supported by RE2, expressions are too
                large, or there are too many globs.
        """
        texts = list(dict.fromkeys(patterns))
        self._names = {text for text in texts if not text.startswith(_REGEX)}
        self._globs = [text for text in texts if text in self._names and set(text) & set("*?[")]
        if len(self._globs) > _MAX_GLOBS or any(len(g) > _MAX_GLOB_LEN for g in self._globs):
            raise claim.error(
                f"expected at most {_MAX_GLOBS} patterns with wildcards, of {_MAX_GLOB_LEN} "
                f"characters each, got {len(self._globs)}, the longest of "
                f"{max(map(len, self._globs))}. Name the modules instead."
            )
        self._regexes = _compile_all([text for text in texts if text.startswith(_REGEX)], claim)

    def first(self, name: str) -> str | None:
        """Return the first pattern that selects the module ``name``; None if there is none."""
        parts = name.split(".")
        spans = (
            ".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)
        )
        line = name.encode(errors="replace")
        return (
            next((span for span in spans if span in self._names), None)
            or next((glob for glob in self._globs if fnmatchcase(name, glob)), None)
            or next((text for text, regex in self._regexes.items() if regex.match(line)), None)
        )


def _compile_all(patterns: Iterable[str], claim: Claim) -> dict[str, Any]:
    size, compiled = 0, {}
    for pattern in patterns:
        compiled[pattern] = _compile(pattern.removeprefix(_REGEX), claim)
        size += compiled[pattern].programsize
        if size > _MAX_REGEX_SIZE:
            raise claim.error(
                f"expected regular expressions of at most {_MAX_REGEX_SIZE} instructions in all, "
                f"got more at {clip(pattern, 80)}. Write fewer repeats, or name the modules."
            )
    return compiled


def _compile(text: str, claim: Claim) -> Any:
    if len(text) > _MAX_REGEX_LEN:
        raise _error(claim, text, f"{len(text)} characters, expected at most {_MAX_REGEX_LEN}")
    if found := _OTHERWISE.search(text):
        raise _error(claim, text, f"{clip(found[0], 20)}: not supported. Write it without")
    try:
        return re2.compile(text.encode(errors="replace"), _OPTIONS)
    except re2.error as error:
        raise _error(claim, text, _reason(error)) from error


def _error(claim: Claim, text: str, reason: str) -> UserError:
    return claim.error(f"regular expression {clip(text, 80)}: {reason}")


def _reason(error: Exception) -> str:
    """Return RE2's message with the name of the unsupported construct."""
    given = error.args[0]
    text = given.decode(errors="replace") if isinstance(given, bytes) else str(given)
    operator = re.search(r"invalid perl operator: (\(\?.)", text)
    reference = re.search(r"invalid escape sequence: \\\d", text)
    missing = "backreferences" if reference else _MISSING.get(operator[1]) if operator else None
    if missing is None:
        return clip(text, 80)
    return f"{missing}: not supported ({clip(text, 40)}). Write it without, or name the modules"
