"""Mutations of a text: of its bytes, and, where it is JSON, of its values."""

from __future__ import annotations

import json
from random import Random
from typing import Any

__all__ = ["mutate"]

_TOKENS = (
    *(
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"\\",
        b"\0",
        b"\n",
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"\\ud800",
    ),
    *(
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"1e400",
        b"-4",
        b"549755813888",
        b"0x",
        b"null",
        b"true",
        b"1" * 5000,
    ),
    *(
        b"&a [*a]",
        b"*a",
        b"<<: *a",
        b"!!timestamp x",
        b"!!python/name:os.system",
        b"? ",
        b"- ",
        b"{{",
        b"{%",
        b"%}",
    ),
    *(
        b"[" * 200,
        b"{" * 200,
        b'{"a":' * 200,
        b"x" * 3000,
        b"/dev/zero",
        b"../../x",
        b"data:image/png;base64,",
    ),
)
_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        -4,
        1,
        2**31,
        2**39,
        2**63,
        2**64,
        10**400,
        0.5,
        1e308,
        float("inf"),
        float("nan"),
    ),
    *(
        "",
        "x",
        "x" * 3000,
        "\ud800",
        "\n",
        "/dev/zero",
        "../x",
        "\0",
        "1",
        "<|image_pad|>",
        "<|im_end|>",
    ),
    *(
        [],
        {},
        [[]],
        [None],
        [1] * 300,
        ["x"] * 300,
        {"a": 1},
        {"x" * 500: 1},
        [[[[[[[[[[[]]]]]]]]]]],
    ),
)


def mutate(text: bytes, random: Random) -> bytes:
    """One to four mutations of ``text``."""
    for _ in range(random.randint(1, 4)):
        text = (_mutate_value if random.random() < 0.6 else _mutate_bytes)(text, random)
    return text


def _mutate_bytes(text: bytes, random: Random) -> bytes:
    start = random.randrange(len(text) + 1)
    stop = min(len(text), start + random.choice((0, 1, 2, 8, 64)))
    piece = random.choice(
        (b"", bytes([random.randrange(256)]), random.choice(_TOKENS), text[start:stop] * 3)
    )
    return text[:start] + piece + text[stop:]


def _mutate_value(text: bytes, random: Random) -> bytes:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return _mutate_bytes(text, random)
    places = list(_places(value))
    if not places:
        return json.dumps(random.choice(_VALUES)).encode()
    parent, key = random.choice(places)
    match random.randrange(4):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[random.choice(("", "x" * 300, "\ud800", f"{key}_", key.upper()))] = parent.pop(
                key
            )
        case 2:
            other, name = random.choice(places)
            parent[key] = other[name]
        case _:
            parent[key] = random.choice(_VALUES)
    try:
        return json.dumps(value).encode()
    except (ValueError, RecursionError):  # a value within itself
        return _mutate_bytes(text, random)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in ``value``: what holds it, and its key or index."""
    found: list[tuple[Any, Any]] = []
    queue = [value] if isinstance(value, dict | list) else []
    while queue and len(found) < 2000:
        parent = queue.pop()
        for key in list(parent) if isinstance(parent, dict) else range(len(parent)):
            found.append((parent, key))
            if isinstance(parent[key], dict | list):
                queue.append(parent[key])
    return found
