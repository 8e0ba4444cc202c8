"""Random chat requests: short and long texts, some with an image, no two equal."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from PIL import Image

from trt_eagle3.decode.request.request import Request
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.image import load_image
from trt_eagle3.prompts.prompt_file import Question

__all__ = [
    "MAX_WORDS",
    "Bodies",
    "Body",
    "body_source",
    "drawn_bodies",
    "question_bodies",
    "request_of",
]

Body = dict[str, Any]

Bodies = Callable[[int, int, int], Sequence[Body]]
"""Returns ``count`` requests, by a seed of their sizes and a salt of their contents."""

_WORDS = (
    "river",
    "stone",
    "cloud",
    "paper",
    "light",
    "winter",
    "garden",
    "engine",
    "market",
    "bridge",
)
MAX_WORDS = 900
_PROMPT_WORDS = (
    (10, 60),
    (60, 250),
    (250, MAX_WORDS),
)  # short, middling and long prompts, equally often
_ANSWER_TOKENS = (16, 256)
_SIDES = (224, 256, 320, 384, 448)  # of images, pixels
_QUALITY = 85


def body_source(
    questions: Sequence[Question] | None, *, images: float, max_tokens: int, max_words: int
) -> Bodies:
    """Return a source of request bodies: ``questions`` in turn, or random bodies without them."""

    def bodies(count: int, seed: int, salt: int) -> Sequence[Body]:
        if questions is not None:
            return question_bodies(questions, count, max_tokens=max_tokens)
        return drawn_bodies(
            count,
            seed=seed,
            salt=salt,
            images=images,
            max_tokens=max_tokens,
            max_words=max_words,
        )

    return bodies


def drawn_bodies(
    count: int,
    *,
    seed: int,
    salt: int = 0,
    images: float,
    max_tokens: int,
    max_words: int = MAX_WORDS,
) -> list[Body]:
    """Return ``count`` random bodies of ``/v1/chat/completions``; answers run to random lengths.

    Args:
        seed: of lengths and sizes.
        salt: of contents. A server that has seen another salt can reuse nothing.
        images: the share of bodies with an image.
        max_tokens: most tokens of an answer.
        max_words: most words of a prompt.
    """
    draw = random.Random(seed)
    return [_drawn(draw, f"{seed}/{salt}/{i}", images, max_tokens, max_words) for i in range(count)]


def question_bodies(questions: Sequence[Question], count: int, *, max_tokens: int) -> list[Body]:
    """Return bodies of the questions in turn; questions with videos are skipped.

    OpenAI-compatible servers accept no videos.

    Raises:
        UserError: all have videos, or an image cannot be read.
    """
    kept = [question for question in questions if not question.videos]
    if not kept:
        raise UserError("prompts: all of them have videos. Give texts or images.")
    contents = [[*map(_part, map(_file_uri, q.images)), _text(q.prompt)] for q in kept]
    return [_body(content, max_tokens) for content in islice(cycle(contents), count)]


def _drawn(draw: random.Random, key: str, images: float, max_tokens: int, max_words: int) -> Body:
    words = draw.choices(_WORDS, k=min(draw.randint(*draw.choice(_PROMPT_WORDS)), max_words))
    number = crc32(key.encode())
    content = [_text(f"{number:010}: {' '.join(words)}. What follows?")]
    size = draw.choice(_SIDES), draw.choice(_SIDES)
    if draw.random() < images:
        content.insert(0, _part(_drawn_uri(size, number)))
    body = _body(content, min(draw.randint(*_ANSWER_TOKENS), max_tokens))
    return {**body, "ignore_eos": True}


def _body(content: list[Body], max_tokens: int) -> Body:
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0.0,
    }


def _text(text: str) -> Body:
    return {"type": "text", "text": text}


def _part(uri: str) -> Body:
    return {"type": "image_url", "image_url": {"url": uri}}


def _drawn_uri(size: tuple[int, int], seed: int) -> str:
    """Draw soft shapes."""
    numbers = np.random.default_rng(seed)
    small = Image.fromarray(numbers.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    return _uri(small.resize(size, Image.Resampling.BICUBIC), "JPEG", quality=_QUALITY)


def _file_uri(image: Any) -> str:
    if isinstance(image, str | Path):
        try:
            data = Path(image).read_bytes()
        except OSError as error:
            raise UserError(f"{image}: cannot read the image: {error.strerror}") from error
        return f"data:image/*;base64,{base64.b64encode(data).decode()}"
    return _uri(load_image(image), "PNG")


def _uri(image: Image.Image, kind: str, **options: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f"data:image/{kind.lower()};base64,{data}"


def request_of(body: Body, *, speculation: bool) -> Request:
    """Convert a body of ``body_source`` to a request."""
    parts = body["messages"][0]["content"]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    uris = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    images = [base64.b64decode(uri.partition(",")[2]) for uri in uris]
    sampling = SamplingParams(
        max_tokens=body["max_tokens"], ignore_eos=body.get("ignore_eos", False)
    )
    return Request("".join(texts), images, sampling=sampling, speculation=speculation)
