"""What a request takes and refuses, in one line, before anything is done for it."""

from __future__ import annotations

from typing import Any

import pytest

from trt_eagle3.decode.request import Request
from trt_eagle3.errors import UserError

BAD: list[tuple[str, Any, str]] = [
    ("prompt", 5, "expected a text or a list of messages, got int"),
    ("prompt", None, "expected a text or a list of messages, got NoneType"),
    ("max_tokens", 0, "expected a whole number of at least 1, got 0"),
    ("max_tokens", True, "expected a whole number of at least 1, got True"),
    ("max_tokens", 2.0, "expected a whole number of at least 1, got 2.0"),
    ("images", "a.png", "expected a list, got str. Put it in a list."),
    ("videos", {"a": 1}, "expected a list, got dict. Put it in a list."),
    ("stop", "end", "expected a list, got str. Put it in a list."),
    ("stop", 5, "expected a list, got int. Put it in a list."),
    ("stop", [""], "expected a list of texts that are not empty, got ['']"),
    ("stop", ["a", None], "expected a list of texts that are not empty, got ['a', None]"),
    ("stop_token_ids", 3, "expected a list, got int. Put it in a list."),
    ("stop_token_ids", [True], "expected a list of token ids, got [True]"),
    ("stop_token_ids", ["7"], "expected a list of token ids, got ['7']"),
    ("ignore_eos", "no", "expected true or false, got 'no'"),
    ("speculation", None, "expected true or false, got None"),
    ("sampling", {"temperature": 1}, "expected a SamplingParams, got dict"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_bad_value_is_refused_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        Request(**{"prompt": "hello", name: value})
    assert str(error.value) == f"{name}: {message}"


def test_lists_may_be_none_and_become_tuples() -> None:
    names = ("images", "videos", "stop", "stop_token_ids")
    empty: dict[str, Any] = dict.fromkeys(names)
    assert all(getattr(Request("hello", **empty), name) == () for name in names)
    given: dict[str, Any] = {"stop": ["a"], "stop_token_ids": [7]}
    request = Request("hello", **given)
    assert (request.stop, request.stop_token_ids) == (("a",), (7,))
    given["stop"].append("b")
    assert request.stop == ("a",)


def test_pictures_of_messages_stand_in_the_messages() -> None:
    with pytest.raises(
        UserError, match="images and videos: of a list of messages they stand in the messages"
    ):
        Request([{"role": "user", "content": "hello"}], images=["a.png"])


@pytest.mark.parametrize(
    ("request_", "has_media"),
    [
        (Request("a"), False),
        (Request("a", images=["a.png"]), True),
        (Request("a", videos=["frames"]), True),
        (
            Request(
                [
                    {"role": "user", "content": "a"},
                    {"role": "user", "content": ["b", {"type": "text"}]},
                    5,
                ]
            ),
            False,
        ),
        (
            Request(
                [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "a"}, {"type": "image_url"}],
                    }
                ]
            ),
            True,
        ),
    ],
)
def test_request_knows_whether_there_is_more_than_text(request_: Request, has_media: bool) -> None:
    assert request_.has_media == has_media
