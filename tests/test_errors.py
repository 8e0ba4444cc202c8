"""What strangers wrote is quoted briefly, on one line, and at little cost."""

from __future__ import annotations

import time

import pytest

from trt_eagle3.errors import EngineFailedError, UserError, as_failure, clip, is_failure, quote

VALUES = {
    "text": "x" * 10_000_000,
    "lines": "a\nb\x1b[2J\u2028c",
    "surrogate": "\ud800",
    "list": ["y" * 1_000_000] * 1_000_000,
    "deep": [[[[[[[[[[1]]]]]]]]]],
    "number": 1 << 1_000_000,
    "bytes": b"z" * 100_000_000,
    "mapping": {("k" * 10_000, i): i for i in range(10_000)},
}


@pytest.mark.parametrize("name", VALUES)
def test_quote_any_value_is_one_short_printable_line(name: str) -> None:
    start = time.process_time()
    line = quote(VALUES[name])
    assert time.process_time() - start < 1
    assert len(line) <= 200
    assert line.isprintable()
    line.encode()


def test_panic_of_a_library_is_a_failure_and_an_order_to_end_is_none() -> None:
    panic = type("PanicException", (BaseException,), {})("out of\nbounds")
    failure = as_failure(panic)
    assert isinstance(failure, EngineFailedError)
    assert (str(failure), failure.__cause__) == ("PanicException: out of\\nbounds", panic)
    usual = ValueError("x")
    assert as_failure(usual) is usual
    assert [is_failure(e) for e in (panic, usual, SystemExit(), KeyboardInterrupt())] == [
        True,
        True,
        False,
        False,
    ]


def test_quote_short_value_is_its_repr() -> None:
    for value in ("it's", 5, None, [1, 2], {"a": [True]}, 1.5, b"x"):
        assert quote(value) == repr(value)


def test_clip_keeps_what_fits_and_escapes_what_cannot_be_printed() -> None:
    assert clip("é" * 200) == "é" * 200
    assert clip("é" * 201) == "é" * 197 + "..."
    assert clip("a\nb\ud800") == r"a\nb\ud800"


def test_user_error_of_any_text_is_one_line_that_can_be_sent() -> None:
    message = str(UserError("image data:\ud800...\nx: expected a picture"))
    assert message.encode() == rb"image data:\ud800...\nx: expected a picture"


def test_user_error_of_any_message_is_bounded_and_keeps_its_fix() -> None:
    message = str(UserError(f"{'x' * 1_000_000}. Use the other one."))
    assert len(message) < 1300
    assert message.endswith("Use the other one.")
