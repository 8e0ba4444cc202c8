"""OpenAI's objects and events, without a server."""

from __future__ import annotations

import json

from trt_eagle3.serving.openai import to_event


def test_event_is_one_line_whatever_its_text_holds() -> None:
    text = "a\u2028b\u2029c\x85d\ne\r\x0b\x1cf é 漢 🙂"
    lines = to_event({"text": text}).splitlines()
    assert lines[1:] == [""]
    assert json.loads(lines[0].removeprefix("data: ")) == {"text": text}
