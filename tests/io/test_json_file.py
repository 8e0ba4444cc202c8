"""JSON is bounded in values and depth, and ambiguous JSON is refused; everything else is the
standard library's.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from trt_eagle3.errors import UserError
from trt_eagle3.io.json_file import MAX_JSON_DEPTH, parse_json, read_json_object

HOSTILE = {
    "too many values": (b"[" + b"[]," * 2_000_000 + b"[]]", "more than 1000000 values"),
    "far too deep": (b"[" * 100_000 + b"]" * 100_000, f"nested deeper than {MAX_JSON_DEPTH}"),
    "a level too deep": (
        b"[" * (MAX_JSON_DEPTH + 2) + b"]" * (MAX_JSON_DEPTH + 2),
        f"nested deeper than {MAX_JSON_DEPTH}",
    ),
    "twice": (b'{"a": {"b": 1, "b": 2}}', "key 'b' appears twice"),
    "long key twice": (b'{"%s": 1, "%s": 2}' % (b"k" * 9999, b"k" * 9999), "appears twice"),
    "UTF-16": ("{}".encode("utf-16"), "not UTF-8 at byte 0"),
    "long number": (b"1" * 5000, "not JSON"),
    "cut off": (b'{"a', "not JSON"),
    "empty": (b"", "not JSON"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_parse_json_hostile_text_is_one_short_line_soon(case: str) -> None:
    data, message = HOSTILE[case]
    start = time.process_time()
    with pytest.raises(UserError, match=message) as caught:
        parse_json(data, "it")
    assert time.process_time() - start < 2
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_parse_json_sound_text_is_as_the_standard_library_reads_it() -> None:
    text = json.dumps({"a": [1, 2.5, None, True, {"b": "\ud800é,[{"}], "c": float("inf")})
    assert parse_json(text, "it") == json.loads(text)
    nested = "[" * (MAX_JSON_DEPTH + 1) + "]" * (MAX_JSON_DEPTH + 1)
    assert parse_json(nested, "it") == json.loads(nested)


def test_read_json_object_other_value_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text("[1]")
    with pytest.raises(UserError, match=r"f\.json: expected a JSON object, got list"):
        read_json_object(tmp_path / "f.json")
