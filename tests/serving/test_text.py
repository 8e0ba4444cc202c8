"""Messages that leave the program can be sent, whatever is in them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trt_eagle3.serving.text import sendable


@given(st.text(st.characters()))
def test_any_message_can_be_sent_as_one_line(text: str) -> None:
    found = sendable(text)
    assert found.encode().decode() == found
    assert found.isprintable()


def test_message_is_readable_and_short() -> None:
    assert sendable("text: 3 > 2, é 漢") == "text: 3 > 2, é 漢"
    assert sendable(ValueError("a\ud800\0\n\u2028b")) == r"a\ud800\x00\n\u2028b"
    assert len(sendable("x" * 100_000)) == 2000
