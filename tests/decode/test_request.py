"""What a request takes and refuses, in one line, before anything is done for it."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from trt_eagle3.decode.request.request import Request
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.errors import UserError
from trt_eagle3.multimodal import Video

BAD: list[tuple[str, Any, str]] = [
    ("prompt", 5, "expected a text or a list of messages, got int"),
    ("prompt", None, "expected a text or a list of messages, got NoneType"),
    (
        "images",
        5,
        "expected paths, URLs, data URIs, bytes, Pillow images or NumPy arrays, one or a list of "
        "them, got int",
    ),
    (
        "videos",
        {"a": 1},
        "expected paths, URLs, data URIs, bytes, Video objects or lists of images, one or a list "
        "of them, got dict",
    ),
    ("speculation", None, "expected true or false, got None"),
    ("sampling", {"temperature": 1}, "expected SamplingParams, got dict"),
]

BAD_SAMPLING: list[tuple[str, Any, str]] = [
    ("max_tokens", 0, "expected a whole number of at least 1, got 0"),
    ("max_tokens", True, "expected a whole number of at least 1, got True"),
    ("max_tokens", 2.0, "expected a whole number of at least 1, got 2.0"),
    ("stop", "", "expected a list of texts that are not empty, got ['']"),
    ("stop", 5, "expected a list, got int. Put it in a list."),
    ("stop", [""], "expected a list of texts that are not empty, got ['']"),
    ("stop", ["a", None], "expected a list of texts that are not empty, got ['a', None]"),
    ("stop_token_ids", 3, "expected a list, got int. Put it in a list."),
    ("stop_token_ids", [True], "expected a list of token ids, got [True]"),
    ("stop_token_ids", ["7"], "expected a list of token ids, got ['7']"),
    ("ignore_eos", "no", "expected true or false, got 'no'"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_bad_value_is_refused_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        Request(**{"prompt": "hello", name: value})
    assert str(error.value) == f"{name}: {message}"


@pytest.mark.parametrize(("name", "value", "message"), BAD_SAMPLING)
def test_bad_end_of_an_answer_is_refused_by_name(name: str, value: Any, message: str) -> None:
    for refused in (SamplingParams, SamplingParams().updated):
        with pytest.raises(UserError) as error:
            refused(**{name: value})
        assert str(error.value) == f"{name}: {message}"


def test_unknown_option_is_refused_with_the_nearest_known_one() -> None:
    for refuse in (SamplingParams, SamplingParams().updated):
        with pytest.raises(
            UserError, match=r"^max_token: unknown option\. Did you mean max_tokens\? Options: "
        ):
            refuse(max_token=5)  # type: ignore[call-arg]
    with pytest.raises(UserError, match=r"^zzz: unknown option\. Options: "):
        SamplingParams(zzz=5)  # type: ignore[call-arg]
    with pytest.raises(UserError, match=r"^n: unknown option\. Give it to generate or chat"):
        SamplingParams(n=3)  # type: ignore[call-arg]


def test_single_values_stand_for_lists_of_one(tmp_path: Path) -> None:
    picture, video = Image.new("RGB", (8, 8)), Video([], fps=1)
    singles: list[Any] = ["a.png", tmp_path, b"1", picture]
    for one in singles:
        assert Request("hello", images=one).images == (one,)
    videos: list[Any] = ["a.mp4", tmp_path, b"1", video]
    for one_video in videos:
        assert Request("hello", videos=one_video).videos == (one_video,)
    assert SamplingParams(stop="end") == SamplingParams(stop=["end"])


def test_sampling_params_survive_copies_and_show_their_fields() -> None:
    sampling = SamplingParams(0.5, stop="end")
    assert list(inspect.signature(SamplingParams).parameters) == [f.name for f in fields(sampling)]
    assert pickle.loads(pickle.dumps(sampling)) == copy.deepcopy(sampling) == sampling


def test_lists_may_be_none_and_become_tuples() -> None:
    request = Request("hello", images=None, videos=None)  # type: ignore[arg-type]
    assert (request.images, request.videos) == ((), ())
    empty: dict[str, Any] = {"stop": None, "stop_token_ids": None}
    assert SamplingParams(**empty) == SamplingParams()
    given: dict[str, Any] = {"stop": ["a"], "stop_token_ids": [7]}
    sampling = SamplingParams(**given)
    assert (sampling.stop, sampling.stop_token_ids) == (("a",), (7,))
    given["stop"].append("b")
    assert sampling.stop == ("a",)


def test_images_of_messages_stand_in_the_messages() -> None:
    with pytest.raises(
        UserError, match="images and videos: expected none beside a list of messages"
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
