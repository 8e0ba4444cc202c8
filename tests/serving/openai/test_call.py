"""OpenAI's objects and events, without a server."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from trt_eagle3.errors import UserError
from trt_eagle3.serving import ServingConfig
from trt_eagle3.serving.openai.call import to_event
from trt_eagle3.serving.openai.chat import read_chat
from trt_eagle3.serving.served_model import ServedModel


def test_event_is_one_line_whatever_its_text_holds() -> None:
    text = "a\u2028b\u2029c\x85d\ne\r\x0b\x1cf é 漢 🙂"
    lines = to_event({"text": text}).splitlines()
    assert lines[1:] == [""]
    assert json.loads(lines[0].removeprefix("data: ")) == {"text": text}


@pytest.mark.parametrize(
    "body",
    [
        {f"field {i}": 1 for i in range(20_000)},
        {"messages": [], "stream_options": {f"field {i}": 1 for i in range(20_000)}},
        {"messages": [5] * 20_000},
        {"messages": [], "stop": [5] * 20_000},
        {"messages": [], "stop_token_ids": ["x"] * 20_000},
    ],
    ids=["fields", "options", "messages", "stop", "stop_token_ids"],
)
def test_refusal_costs_as_much_as_its_first_mistake(
    model: ServedModel, body: dict[str, Any]
) -> None:
    serving = ServingConfig(strict_fields=True)
    tracemalloc.start()
    try:
        with pytest.raises(UserError) as caught:
            read_chat(body, model, serving)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 500
    assert peak < 3 << 20  # an error for each of them takes 10 MB and more
