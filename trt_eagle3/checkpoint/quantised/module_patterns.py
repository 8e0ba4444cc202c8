"""Patterns of module names in quantisation configs, matched in linear time."""

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
_MAX_REGEX_LEN = 2000  # compiling takes more than linear time
_MAX_REGEX_SIZE = 20_000  # instructions of all regular expressions: up to 0.2 us each for a name
_MAX_GLOBS, _MAX_GLOB_LEN = 2000, 500
_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
_OPTIONS.never_capture = True
_OPTIONS.max_mem = 1 << 20
_OTHERWISE = re.compile(r"\{,\d*\}|\{\d*,?\d{9,}|\[:\^?\w+:\]")
"""What RE2 reads otherwise than Python's ``re``, without an error. Producers mean the latter."""
_MISSING = {
    "(?=": "lookahead",
    "(?!": "lookahead",
    "(?<": "lookbehind",
    "(?P": "backreferences",
    "(?>": "atomic groups",
    "(?(": "conditions",
}


class ModulePatterns:
    """Modules that a config means: by name, by a part of the name between dots, by a glob, or by
    ``re:`` and a regular expression that matches from the name's start.
    """

    def __init__(self, patterns: Iterable[str], claim: Claim) -> None:
        """Compile ``patterns``.

        Raises:
            UserError: a regular expression that is none, that RE2 cannot express, or whose size
                passes the limits; more globs than the limit.
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
        """A pattern that means the module called ``name``; None where none does."""
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
    """What RE2 says in bytes, and the name of what it lacks."""
    given = error.args[0]
    told = given.decode(errors="replace") if isinstance(given, bytes) else str(given)
    operator = re.search(r"invalid perl operator: (\(\?.)", told)
    reference = re.search(r"invalid escape sequence: \\\d", told)
    missing = "backreferences" if reference else _MISSING.get(operator[1]) if operator else None
    if missing is None:
        return clip(told, 80)
    return f"{missing}: not supported ({clip(told, 40)}). Write it without, or name the modules"
