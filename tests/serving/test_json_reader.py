"""JSON is counted before it is parsed, wherever its blocks are cut."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trt_eagle3.errors import UserError
from trt_eagle3.serving import ServingConfig
from trt_eagle3.serving.field_error import FieldError
from trt_eagle3.serving.json_fields import largest_field
from trt_eagle3.serving.json_reader import JsonScanner, TooLargeError, parse_request_json

SERVING = ServingConfig()
URI = "data:image/png;base64," + "A" * 5000

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.just(URI),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
).filter(lambda value: "\ud800" not in str(value))


def scan(data: bytes, cuts: list[int], serving: ServingConfig = SERVING) -> JsonScanner:
    scanner, start = JsonScanner(serving), 0
    for cut in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        scanner.feed(data[start:cut])
        start = cut
    return scanner


def num_values(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + num_values(item) for item in value.values())
    return 1 + sum(map(num_values, value)) if isinstance(value, list) else 1


@given(JSON, st.lists(st.integers(0, 1 << 20), max_size=6), st.booleans())
@example(['a"\\', "data:", "\\", "data:\\" + "x" * 5000], [3, 4, 5, 9], True)
@example({"a": URI, "b": [URI + '"']}, [30, 31], True)
def test_value_is_what_json_reads_and_the_count_is_no_lower(
    value: Any, cuts: list[int], ascii_only: bool
) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    scanner = scan(data, cuts)
    assert parse_request_json(data, "body", SERVING, scanner) == value
    assert parse_request_json(data, "body", SERVING) == value
    assert num_values(value) <= scanner._num_values + 1
    whole = scan(data, [])
    assert scanner._num_values == whole._num_values
    assert scanner.media == whole.media
    assert whole._num_text <= scanner._num_text <= len(data)


def test_data_uris_are_no_text() -> None:
    scanner = scan(json.dumps([URI, "x", URI]).encode(), [])
    # a closing quote is its string's
    assert scanner._num_text == len(json.dumps(["", "x", ""])) - 2
    assert len(scanner.media) == 2


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"[" + b"{}," * 21_000_000, "65536 values"),
        (b"[" + b'"",' * 21_000_000, "65536 values"),
        (b'{"a":' * 12_000_000, "65536 values"),
        (b'["' + b'\\"' * 31_000_000, "1048576 bytes of text"),
        (b'{"data:": "' + b"x" * 63_000_000, "1048576 bytes of text"),
        (b" " * 63_000_000, "1048576 bytes of text"),
        (b'["data:' + b"x" * 80_000_000, "67108864 bytes"),
    ],
    ids=["objects", "strings", "nested", "escapes", "text", "spaces", "media"],
)
def test_hostile_body_is_refused_before_anything_is_built(data: bytes, expected: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TooLargeError, match=f"body: more than {expected}"):
            parse_request_json(data, "body", SERVING)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"{", "not JSON"),
        (b"[" * 20_000, "nested deeper than 64 levels"),
        (b'"\xff"', "not JSON"),
        (b'"\xed\xa0\x80"', "not JSON"),
        (b'["' + URI.encode() + b'\xe9"]', "not JSON"),
        (b'{"a": ["x", {"\\ud800": 1}]}', r"not Unicode text at character 0 of '\\ud800'"),
        (b'[{"a": "data:\\ud800"}]', r"not Unicode text at character 5 of 'data:\\ud800'"),
        ('["x"]'.encode("utf-16"), "not JSON"),
        (b"1" * 5000, "not JSON"),
    ],
)
def test_what_is_no_json_is_refused_in_a_line_that_can_be_sent(data: bytes, expected: str) -> None:
    with pytest.raises(UserError, match=expected) as caught:
        parse_request_json(data, "body", SERVING)
    assert str(caught.value).encode()
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


def test_escaped_name_of_a_taken_out_uri_is_harmless() -> None:
    assert parse_request_json(b'["' + URI.encode() + b'", "\\u0064ata:0"]', "body", SERVING) == [
        URI,
        URI,
    ]
    assert parse_request_json(b'["data:0", "data:1"]', "body", SERVING) == ["data:0", "data:1"]


def heavy(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields, "n": 1}).encode()


SCHEMA = {"json_schema": {"schema": {"properties": {f"p{i}": {"type": "x"} for i in range(99)}}}}
LONG = [{"role": "user", "content": 'a "quoted" text, [with] {marks} ' * 99}]


@pytest.mark.parametrize(
    ("data", "by_text", "expected"),
    [
        (heavy(messages=LONG, response_format=SCHEMA), False, "response_format"),
        (heavy(messages=LONG, response_format=SCHEMA), True, "messages"),
        (heavy(messages=LONG, response_format=SCHEMA)[:-300], False, "response_format"),
        (heavy(messages=[URI * 99], tools=["short, but no data"]), True, "tools"),
        (b' { "a\\"b" : [[[' + b"{}," * 99, False, 'a\\\\"b'),
        (b'{"' + "\u00fc".encode() * 99 + b'": [1, 2', False, "\\xfc" * 40),
        (b"[" + b'{"a": [1]},' * 99, False, None),
        (b'"text"', True, None),
        (b"", False, None),
        (b'{"open', False, None),
    ],
)
def test_largest_field_of_a_body_is_named(data: bytes, by_text: bool, expected: str | None) -> None:
    assert largest_field(data, by_text) == expected


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_number_that_is_not_finite_is_refused_by_its_path(number: str) -> None:
    body = '{"a": 1.5, "tools": [{"x": {}}, {"my name": [0.5, NUMBER, NaN]}], "b": 5}'
    with pytest.raises(FieldError, match=r"expected a finite number, got -?(nan|inf)") as caught:
        parse_request_json(body.replace("NUMBER", number).encode(), "body", SERVING)
    assert caught.value.param == "tools[1].my name[1]"
    with pytest.raises(FieldError, match="messages: expected a finite number"):
        parse_request_json(number.encode(), "messages", SERVING)
