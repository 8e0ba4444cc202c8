"""Find the largest field of a refused request body, before it is parsed."""

from __future__ import annotations

import re
from collections import Counter

__all__ = ["largest_field"]

_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[{}\[\],]', re.DOTALL)
_DEEPER = {b"{": 1, b"[": 1, b"}": -1, b"]": -1}
_MEDIA = b'"data:'
_MAX_NAME = 40


def largest_field(data: bytes | bytearray, by_text: bool) -> str | None:
    """Return the name of the field that takes the largest part of a JSON object.

    Args:
        data: the object, or its beginning. by_text: compare bytes of texts without data URIs; else
            compare numbers of values.
    Returns:
        The name, at most 40 characters, ASCII; None if ``data`` is not an object or has no field.
    """
    sizes: Counter[bytes] = Counter()
    name, depth, names_follow = b"", 0, False
    for found in _TOKEN.finditer(data):
        token = found[0]
        if token[:1] == b'"' and depth == 1 and names_follow:
            name, names_follow = token, False
            continue
        depth += _DEEPER.get(token, 0)
        if depth == 1 and token in (b"{", b","):
            names_follow = True
        elif not by_text:
            sizes[name] += 1
        elif token[:1] == b'"' and not token.startswith(_MEDIA):
            sizes[name] += len(token)
    sizes.pop(b"", None)
    if not sizes or not data.lstrip().startswith(b"{"):
        return None
    largest = sizes.most_common(1)[0][0].strip(b'"').decode("utf-8", "replace")
    return ascii(largest[:_MAX_NAME])[1:-1]
