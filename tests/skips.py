"""What tests are skipped for lack of, counted for the end of a run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

__all__ = ["skipped_for_lack"]

_LACKS = (
    ("Chromium", "a browser"),
    ("CUDA device", "a GPU"),
    ("kernel library", "the CUDA kernels (make plugins)"),
    ("nvcc", "nvcc"),
    ("TensorRT headers", "TensorRT's headers"),
    ("TensorRT", "TensorRT"),
    ("Triton", "a Triton server"),
    ("C compiler", "a C compiler"),
    ("hadolint", "hadolint"),
)
"""Part of a reason, and what is missing there; the first that fits counts."""
_MODULE = re.compile(r"could not import '([\w.]+)'")


def skipped_for_lack(reasons: Iterable[str]) -> list[str]:
    """One line for each thing that is missing, the most missed first.

    ``reasons`` has one entry for each skipped test.
    """
    counts = Counter(map(_lack, reasons))
    return [
        f"skipped {what}: {count} {'test' if count == 1 else 'tests'}"
        for what, count in counts.most_common()
    ]


def _lack(reason: str) -> str:
    reason = reason.removeprefix("Skipped: ")
    if module := _MODULE.match(reason):
        return f"for lack of {module[1]}"
    for part, what in _LACKS:
        if part in reason:
            return f"for lack of {what}"
    return f"({reason})"
