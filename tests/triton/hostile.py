"""Requests that must be refused, each with what the refusal says; and a small corpus of broken
images.
"""

from __future__ import annotations

import functools
import io
import json
import random
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from PIL import Image

from tests.triton.server import data_uri

__all__ = ["MALFORMED", "REFUSED", "SURROGATES", "as_body", "broken_images"]


@functools.cache
def encode(kind: str = "PNG", side: int = 40, mode: str = "RGB") -> bytes:
    noise = np.random.default_rng(0).integers(0, 255, (side, side, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(buffer, kind)
    return buffer.getvalue()


def png_of_size(width: int, height: int) -> bytes:
    """A PNG that says it is so big and holds next to nothing."""
    chunks = (
        b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0),
        b"IDAT" + zlib.compress(b""),
        b"IEND",
    )
    packed = (struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def stripe(length: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (length, 2)).save(buffer, "PNG")
    return buffer.getvalue()


def image(data: bytes, kind: str = "image/png") -> dict[str, Any]:
    return {"text_input": "What do you see?", "image_url": data_uri(data, kind)}


def url(text: str) -> dict[str, Any]:
    return {"text_input": "What do you see?", "image_url": text}


def text(**inputs: Any) -> dict[str, Any]:
    return {"text_input": "What is 12 plus 30?", **inputs}


def messages(value: Any) -> dict[str, Any]:
    return {"messages": value if isinstance(value, str) else json.dumps(value)}


def content(*parts: Any) -> dict[str, Any]:
    return messages([{"role": "user", "content": list(parts)}])


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) run\n"
PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
NOT_FETCHED, NOT_READ, NO_IMAGE = (
    "not fetched",
    "files are not read",
    "Supported: ",
)
PNG = data_uri(encode())

SURROGATES = {
    "source": r'[{"role": "user", "content": [{"type": "image_url",'
    r' "image_url": {"url": "data:\ud800"}}]}]',
    "path": r'[{"role": "user", "content": [{"type": "image", "image": "\ud800"}]}]',
    "part": r'[{"role": "user", "content": [{"type": "\udfff"}]}]',
    "text": r'[{"role": "user", "content": "a \udc80"}]',
    "role": r'[{"role": "\ud800", "content": "x"}]',
    "name": r'[{"role": "user", "content": "x", "\ud800": 1}]',
    "no message": r'["\ud800"]',
}
"""Messages as JSON with texts that no encoding can carry."""

REFUSED: Mapping[str, tuple[dict[str, Any] | bytes, str]] = {
    # parameters
    "max_tokens 0": (text(max_tokens=0), "max_tokens"),
    "max_tokens negative": (text(max_tokens=-5), "max_tokens"),
    "temperature NaN": (b'{"text_input": "x", "temperature": NaN}', "temperature"),
    "temperature negative": (text(temperature=-0.1), "temperature"),
    "temperature infinite": (text(temperature=1e39), "temperature"),
    "temperature huge": (text(temperature=1e6), "temperature"),
    "top_p below 0": (text(top_p=-0.5), "top_p"),
    "top_p over 1": (text(top_p=1.5), "top_p"),
    "top_p NaN": (b'{"text_input": "x", "top_p": NaN}', "top_p"),
    "top_k negative": (text(top_k=-1), "top_k"),
    "min_p over 1": (text(min_p=2), "min_p"),
    "repetition_penalty 0": (text(repetition_penalty=0), "repetition_penalty"),
    "presence_penalty infinite": (text(presence_penalty=-1e39), "presence_penalty"),
    "empty stop word": (text(stop_words=["", "x"]), "stop"),
    "unknown input": (text(beam_width=4), "beam_width"),
    "unknown parameter": (text(parameters={"bad_words": "x"}), "bad_words"),
    "parameter of a strange type": (text(beam_width={"a": [1]}), "beam_width"),
    # text
    "no prompt": ({"max_tokens": 4}, "text_input or messages"),
    "two prompts": (text(messages="[]"), "text_input or messages"),
    "invalid UTF-8": (b'{"text_input": "\xff\xfe\xc3"}', "not UTF-8"),
    "overlong UTF-8": (b'{"text_input": "\xc0\xaf"}', "not UTF-8"),
    "invalid UTF-8 in a stop word": (b'{"text_input": "x", "stop_words": "\xff"}', "not UTF-8"),
    "100k characters": (text(text_input="What is 12 plus 30? " * 5000), "the limit is"),
    "100k letters without a space": (text(text_input="a" * 100_000), "the limit is"),
    "2M characters": (text(text_input="x " * 1_000_000), "the limit is"),
    "two texts": (text(text_input=["a", "b"]), "shape"),
    # messages
    "messages that are no JSON": (messages("{"), "not JSON"),
    "messages that are no list": (messages({"role": "user"}), "messages"),
    "messages nested deep": (messages("[" * 10_000), "nested deeper"),
    "messages nested deeper": (messages("[" * 100_000), "more than 65536 values"),
    "30 MB of messages": (messages("[" + "{}," * 10_000_000 + "{}]"), "more than 65536 values"),
    "messages with a number": (messages([5]), "messages"),
    "message without a role": (messages([{"content": "x"}]), "role"),
    "message without content": (messages([{"role": "user"}]), "content"),
    "content that is a number": (messages([{"role": "user", "content": 7}]), "content"),
    "unknown part": (content({"type": "audio", "audio": "x"}), "unknown part"),
    "part without a value": (content({"type": "image"}), "unknown part"),
    "path in a part": (content({"type": "image", "image": "/etc/passwd"}), NOT_READ),
    "path under transformers' key": (content({"type": "image", "path": "/etc/passwd"}), NOT_READ),
    "file URL in a part": (
        content({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}),
        NOT_READ,
    ),
    "image that is a number": (content({"type": "image", "image": 5}), "expected a path"),
    "image that is a list": (content({"type": "image", "image": [PNG]}), "expected a path"),
    "folder as a video": (content({"type": "video", "video": "/etc"}), NOT_READ),
    "video that is a mapping": (content({"type": "video", "video": {"frames": "/etc"}}), "video"),
    "frames from files": (
        content({"type": "video", "video": ["/etc/passwd", "/etc/hosts"]}),
        NOT_READ,
    ),
    "lone surrogate": (messages('[{"role": "user", "content": "\\ud800"}]'), "not Unicode"),
    "lone surrogate in a source": (messages(SURROGATES["source"]), "not Unicode"),
    "lone surrogate in a role": (messages(SURROGATES["role"]), "not Unicode"),
    "lone surrogate in a name": (messages(SURROGATES["name"]), "not Unicode"),
    "lone surrogate in a frame": (text(video='["data:\\ud800"]'), "not Unicode"),
    "images beside messages": (
        {**messages([{"role": "user", "content": "x"}]), "image_url": PNG},
        "messages",
    ),
    # where images come from
    "path": (url("/etc/passwd"), NOT_READ),
    "relative path": (url("../../etc/passwd"), NOT_READ),
    "file URL": (url("file:///etc/passwd"), NOT_READ),
    "file URL in capitals": (url("FILE:///etc/passwd"), NOT_READ),
    "path with NUL": (url("/etc/passwd\0.png"), NOT_READ),
    "empty source": (url(""), NOT_READ),
    "metadata service": (url("http://169.254.169.254/latest/meta-data/"), NOT_FETCHED),
    "this server": (url("http://localhost:8000/v2"), NOT_FETCHED),
    "https": (url("https://example.com/cat.png"), NOT_FETCHED),
    "ftp": (url("ftp://example.com/cat.png"), NOT_FETCHED),
    "gopher": (url("gopher://example.com/1"), NOT_READ),
    # what images are
    "data URI without base64 of text": (url("data:image/png,abc"), NO_IMAGE),
    "data URI without data": (url("data:image/png;base64,"), NO_IMAGE),
    "broken base64": (url("data:image/png;base64,@@@@"), "base64 is broken"),
    "base64 of text": (image(b"hello"), NO_IMAGE),
    "truncated PNG": (image(encode()[:2000]), "broken image"),
    "truncated JPEG": (image(encode("JPEG")[:400]), "image"),
    "truncated WebP": (image(encode("WEBP")[:200]), "image"),
    "bomb of 900 megapixels": (image(png_of_size(30_000, 30_000)), "pixels"),
    "bomb of a long row": (image(png_of_size(2_000_000_000, 1)), "pixels"),
    "PNG of no pixels": (image(png_of_size(0, 0)), "image"),
    "stripe": (image(stripe(20_000)), "image"),
    "SVG": (image(SVG, "image/svg+xml"), NO_IMAGE),
    "PostScript": (image(POSTSCRIPT, "image/eps"), NO_IMAGE),
    "TIFF": (image(encode("TIFF"), "image/tiff"), NO_IMAGE),
    "ICO": (image(encode("ICO"), "image/x-icon"), NO_IMAGE),
    "21 MB": (url("data:image/png;base64," + "A" * (29 << 20)), "the limit is 20971520"),
    "17 images": (text(image_url=[PNG] * 17), "the limit is 16"),
    "second image broken": (text(image_url=[PNG, "data:image/png;base64,AAAA"]), NO_IMAGE),
    # videos
    "video path": (text(video="/etc/passwd"), NOT_READ),
    "video URL": (text(video="https://example.com/clip.mp4"), NOT_FETCHED),
    "playlist": (text(video=data_uri(PLAYLIST, "video/mp4")), "not a supported video"),
    "MP4 of zeros": (text(video=data_uri(b"\0\0\0\x18ftypmp42" + bytes(99), "video/mp4")), "video"),
    "no frames": (text(video="[]"), "no frames"),
    "frames that are numbers": (text(video="[1, 2]"), "video"),
    "frames nested deep": (text(video="[" * 10_000), "nested deeper"),
    "frames of two sizes": (text(video=json.dumps([PNG, data_uri(encode(side=50))])), "Resize"),
}
"""Name -> the body of a ``generate`` request, and a part of the message that it is refused with
(HTTP 400).
"""

MALFORMED: Mapping[str, bytes] = {
    "empty": b"",
    "cut off": b'{"text_input": "x"',
    "a list": b"[1]",
    "nested deep": b"[" * 100_000,
    "a number for a text": b'{"text_input": 5}',
    "null": b'{"text_input": null}',
    "lone surrogate": b'{"text_input": "\\ud800"}',
    "fraction for a count": b'{"text_input": "x", "max_tokens": 1.5}',
    "text for a count": b'{"text_input": "x", "max_tokens": "many"}',
    "number beyond double": b'{"text_input": "x", "temperature": 1e400}',
    "negative seed": b'{"text_input": "x", "seed": -1}',
    "seed beyond 64 bits": b'{"text_input": "x", "seed": 99999999999999999999}',
    "number for a switch": b'{"text_input": "x", "stream": 1}',
}
"""What the server's own JSON reader refuses, with 400 or 500, before our model sees it."""


def broken_images(count: int) -> Iterator[bytes]:
    """Images with some bytes changed, cut or doubled: the same ones every time."""
    random_ = random.Random(8)
    for i in range(count):
        data = bytearray(
            encode(("PNG", "JPEG", "GIF", "WEBP", "BMP")[i % 5], mode="P" if i % 5 == 2 else "RGB")
        )
        for _ in range(random_.randint(1, 8)):
            data[random_.randrange(len(data))] = random_.randrange(256)
        if i % 3 == 1:
            del data[random_.randrange(20, len(data)) :]
        if i % 3 == 2:
            cut = random_.randrange(len(data))
            data = data[:cut] + data[cut // 2 :]
        yield bytes(data)


def as_body(request: dict[str, Any] | bytes) -> bytes:
    return request if isinstance(request, bytes) else json.dumps(request).encode()
