"""What a `MediaPolicy` excludes is refused before it is read, fetched or decoded."""

from __future__ import annotations

import base64
import io
import random
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image, ImageFile

from tests.multimodal.bombs import endless_jpeg, jpeg_of_scans
from tests.multimodal.test_image import encode, picture
from tests.multimodal.test_video import CONFIG, frames, write_file
from trt_eagle3.errors import UserError
from trt_eagle3.multimodal import MediaPolicy, Video, load_image, load_video
from trt_eagle3.multimodal.fetch import read_media
from trt_eagle3.serving import ServingConfig

SERVED = MediaPolicy(paths=False, formats=("PNG", "JPEG"), max_bytes=100_000, max_pixels=10_000)


def data_uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


class Site(BaseHTTPRequestHandler):
    """A host: a picture, redirects, a big file, one that never ends, one that hangs."""

    requests: list[str] = []  # noqa: RUF012 (one site at a time)

    def do_GET(self) -> None:
        self.requests.append(self.path)
        port = self.server.server_address[1]
        places = {
            "/home": f"http://127.0.0.1:{port}/picture.png",
            "/away": "http://169.254.169.254/",
            "/loop": "/loop",
        }
        places |= {"/file": "file:///etc/passwd"}
        if self.path in places:
            self.send_response(302)
            self.send_header("Location", places[self.path])
            self.end_headers()
        elif self.path == "/picture.png":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(encode(picture()))
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(bytes(10_000))
            except OSError:
                pass
        elif self.path == "/drip":
            self.send_response(200)
            self.end_headers()
            self.drip(b"x" * 1000)
        elif self.path == "/slow-headers":
            self.drip(b"HTTP/1.0 200 OK\r\n" + b"X-Header: 1\r\n" * 100)
        elif self.path.startswith("/chain"):
            time.sleep(0.1)
            self.send_response(302)
            self.send_header("Location", f"/chain{len(self.path)}")
            self.end_headers()
        elif self.path == "/redirect-with-endless-body":
            self.send_response(302)
            self.send_header("Location", "/picture.png")
            self.end_headers()
            self.drip(b"x" * 1000)
        elif self.path == "/short":
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            self.wfile.write(encode(picture()))
        else:
            self.send_error(404)

    def drip(self, data: bytes) -> None:
        """20 bytes a second."""
        try:
            for value in data:
                self.wfile.write(bytes([value]))
                self.wfile.flush()
                time.sleep(0.05)
        except OSError:
            pass

    def log_message(self, *_: Any) -> None:
        """Silence."""


@pytest.fixture
def site() -> Iterator[str]:
    Site.requests = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def refusal(source: Any, policy: MediaPolicy = SERVED) -> str:
    with pytest.raises(UserError) as caught:
        load_image(source, policy=policy)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


def test_data_uri_and_bytes_are_read() -> None:
    for source in (
        encode(picture()),
        data_uri(encode(picture())),
        "DATA" + data_uri(encode(picture()))[4:],
    ):
        np.testing.assert_array_equal(
            np.asarray(load_image(source, policy=SERVED)), np.asarray(picture())
        )


@pytest.mark.parametrize("form", ["{}", "file://{}", "FILE://{}", "file:{}", " {}"])
def test_path_is_not_read(tmp_path: Path, form: str) -> None:
    path = tmp_path / "real.png"
    path.write_bytes(encode(picture()))
    assert "files are not read on behalf of a request" in refusal(form.format(path))
    assert "files are not read on behalf of a request" in refusal(path)


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "BMP", "PPM", "ICO"])
def test_format_that_is_not_listed_is_not_decoded(kind: str) -> None:
    assert "Supported: PNG, JPEG" in refusal(encode(picture(), kind))


def test_postscript_is_not_interpreted() -> None:
    buffer = io.BytesIO()
    picture().save(buffer, "EPS")
    assert "Supported: PNG, JPEG" in refusal(buffer.getvalue())


def test_size_in_bytes_is_bounded_before_decoding() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (99, 99, 3), dtype=np.uint8))
    small = MediaPolicy(paths=False, max_bytes=1000)
    assert "the limit is 1000" in refusal(encode(noise), small)
    assert "the limit is 1000" in refusal(data_uri(encode(noise)), small)
    assert load_image(encode(noise), policy=SERVED).size == (99, 99)


def test_bomb_is_refused_by_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = encode(Image.new("1", (20_000, 20_000)))
    assert len(bomb) < SERVED.max_bytes  # type: ignore[operator]
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)
    assert "pixels" in refusal(bomb)


def test_jpeg_of_many_scans_is_refused_before_it_is_decoded() -> None:
    policy = replace(SERVED, max_jpeg_scans=100, max_pixels=1 << 25, max_bytes=1 << 20)
    start = time.perf_counter()
    assert "a JPEG of 20000 scans, the limit is 100. Save it again" in refusal(
        endless_jpeg(), policy
    )
    assert time.perf_counter() - start < 8, "of half a minute or more"
    assert load_image(jpeg_of_scans(100, 64), policy=policy).size == (64, 64)
    assert "101 scans" in refusal(jpeg_of_scans(101, 64), policy)


def test_bytes_of_metadata_that_look_like_scans_are_none() -> None:
    policy = replace(SERVED, max_jpeg_scans=3)
    for options in ({"comment": b"\xff\xda" * 500}, {"exif": b"Exif\0\0" + b"\xff\xda" * 500}):
        data = encode(picture(), "JPEG", **options)
        assert data.count(b"\xff\xda") > 500
        assert load_image(data, policy=policy).size == picture().size
    progressive = encode(picture(), "JPEG", progressive=True, comment=b"\xff\xda" * 500)
    assert "a JPEG of 10 scans, the limit is 3" in refusal(progressive, policy)


@pytest.mark.parametrize(
    "url",
    [
        "http://{}/picture.png",
        "https://example.com/a.png",
        "ftp://{}/picture.png",
        "HTTP://{}/picture.png",
        "s3://b/k",
    ],
)
def test_nothing_is_fetched_without_an_allowed_host(site: str, url: str) -> None:
    assert "not fetched" in refusal(url.format(site))
    assert Site.requests == []


def allowing(*hosts: str, seconds: float = 30.0) -> MediaPolicy:
    return MediaPolicy(paths=False, allowed_hosts=hosts, max_bytes=100_000, fetch_timeout_s=seconds)


def test_allowed_host_is_fetched_from(site: str) -> None:
    for path in ("picture.png", "home", "redirect-with-endless-body"):
        image = load_image(f"http://{site}/{path}", policy=allowing(site))
        np.testing.assert_array_equal(np.asarray(image), np.asarray(picture()))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("away", "'169.254.169.254', port 80, is not in allowed_hosts. Send the data itself"),
        ("file", "only http and https URLs are fetched"),
        ("loop", "cannot be fetched (more than 10 redirects). Check the URL."),
        ("absent", "cannot be fetched (status 404 Not Found). Check the URL."),
        ("short", "bytes early). Check the URL."),
        ("endless", "the limit is 100000"),
        ("picture.png\r\nX: y", "cannot be fetched"),
    ],
)
def test_what_an_allowed_host_may_not_do(site: str, path: str, expected: str) -> None:
    assert expected in refusal(f"http://{site}/{path}", allowing(site))


@pytest.mark.parametrize("path", ["drip", "slow-headers", "chain"])
def test_whole_fetch_has_one_deadline(site: str, path: str) -> None:
    start = time.perf_counter()
    found = refusal(f"http://{site}/{path}", allowing(site, seconds=0.5))
    assert found.endswith("cannot be fetched (not complete after 0.5 s). Check the URL.")
    assert 0.5 <= time.perf_counter() - start < 5, "of 50 s that dripping takes"


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_host_that_says_nothing_has_the_deadline_too(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # also in a TLS handshake
        host = f"127.0.0.1:{silent.getsockname()[1]}"
        start = time.perf_counter()
        found = refusal(f"{scheme}://{host}/x.png", allowing(host, seconds=0.3))
    assert "cannot be fetched (" in found
    assert 0.3 <= time.perf_counter() - start < 5


def test_name_that_is_looked_up_for_long_has_the_deadline_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = threading.Event()
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: answered.wait(30) and [])
    found = refusal("http://a.example/x.png", allowing("a.example", seconds=0.2))
    answered.set()
    assert found.endswith("cannot be fetched (not complete after 0.2 s). Check the URL.")


def test_fetch_over_tls_reads_what_the_host_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    tls = Path(__file__).parents[1] / "serving/tls"
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls / "cert.pem", tls / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    trusting = ssl.create_default_context(cafile=tls / "cert.pem")
    monkeypatch.setattr(ssl, "create_default_context", lambda: trusting)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
    host = f"localhost:{server.server_address[1]}"
    image = load_image(f"https://{host}/picture.png", policy=allowing(host))
    server.shutdown()
    server.server_close()
    np.testing.assert_array_equal(np.asarray(image), np.asarray(picture()))


@pytest.mark.parametrize(
    "url",
    [
        "http://{port}@evil.example/x",
        "http://user@127.0.0.1:{port}/picture.png",
        "http://127.0.0.1:1/picture.png",
        "http://127.0.0.1.evil.example:{port}/x",
        "http://[::1/x",
        "http://127.0.0.1:99999/x",
    ],
)
def test_other_spellings_of_a_host_are_not_it(site: str, url: str) -> None:
    assert refusal(url.format(port=site.partition(":")[2]), allowing(site))
    assert Site.requests == []


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://b.example/x.png", "'b.example', port 80, is not in allowed_hosts"),
        ("https://a.example:8443/x.png", "'a.example', port 8443, is not in allowed_hosts"),
        ("http://c.example/x.png", "'c.example', port 80, is not in allowed_hosts"),
        ("https:///x.png", "'', port 443, is not in allowed_hosts"),
        ("ftp://a.example/x.png", "only http and https URLs are fetched"),
        ("http://user@a.example/x.png", "URLs with a user's name in them are not fetched"),
        (f"http://{'x' * 300}.example/x.png", "port 80, is not in allowed_hosts"),
    ],
)
def test_refusal_names_the_host_where_hosts_are_allowed(url: str, expected: str) -> None:
    assert expected in refusal(url, allowing("a.example", "c.example:8080"))


@pytest.mark.parametrize(
    ("url", "hosts", "expected"),
    [
        ("http://B.example:81/x", (), "Allow its host (--allow-host b.example:81), or download it"),
        ("https://b.example/x", ("a.example",), "Allow its host (--allow-host b.example), or"),
        ("s3://bucket/x.png", (), "are not fetched here. Download it and give the path."),
        ("http://me@b.example/x", ("a.example",), "fetched here. Download it and give the path."),
    ],
)
def test_whoever_chooses_the_hosts_is_told_how(
    url: str, hosts: tuple[str, ...], expected: str
) -> None:
    assert expected in refusal(url, MediaPolicy(paths=True, allowed_hosts=hosts))


def test_failed_fetch_is_told_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    found = refusal(f"http://127.0.0.1:{port}/x.png", allowing(f"127.0.0.1:{port}"))
    assert found.endswith("cannot be fetched (Connection refused). Check the URL.")


def test_wildcard_means_what_lies_below(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("socket.getaddrinfo", lambda host, *_, **__: asked.append(host) or [])
    for host in ("a.example.com", "a.b.example.com", "example.com", "badexample.com"):
        refusal(f"https://{host}/x.png", allowing("*.example.com"))
    assert asked == ["a.example.com", "a.b.example.com"]


def test_video_in_memory_equals_the_file(tmp_path: Path) -> None:
    path = write_file(tmp_path / "clip.mp4", count=8)
    expected = load_video(path, CONFIG)
    for source in (path.read_bytes(), data_uri(path.read_bytes(), "video/mp4")):
        found = load_video(source, CONFIG, policy=SERVED)
        assert found.times == expected.times
        np.testing.assert_array_equal(found.frames, expected.frames)


def video_refusal(source: Any, policy: MediaPolicy = SERVED) -> str:
    with pytest.raises(UserError) as caught:
        load_video(source, CONFIG, policy=policy)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_video_paths_are_not_read(tmp_path: Path) -> None:
    path = write_file(tmp_path / "clip.mp4", count=3)
    picture().save(tmp_path / "0.png")
    for source in (
        path,
        str(path),
        f"file://{path}",
        tmp_path,
        Video(str(tmp_path)),
        [tmp_path / "0.png"] * 2,
    ):
        assert "files are not read" in video_refusal(source)


def test_playlist_is_no_video(tmp_path: Path) -> None:
    path = write_file(tmp_path / "clip.mp4", count=3)
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile://{path}\n#EXT-X-ENDLIST\n"
    assert "not a supported video" in video_refusal(playlist.encode())
    assert "not a supported video" in video_refusal(f"ffconcat version 1.0\nfile {path}\n".encode())


def test_video_sizes_are_bounded(tmp_path: Path) -> None:
    data = write_file(tmp_path / "clip.mp4", count=8).read_bytes()
    assert "the limit is 1000" in video_refusal(data, MediaPolicy(paths=False, max_pixels=1000))
    assert "the limit is 3072" in video_refusal(
        data, MediaPolicy(paths=False, max_video_pixels=3072)
    )
    assert "the limit is 3" in video_refusal(data, MediaPolicy(paths=False, max_video_frames=3))
    assert "the limit is 1200" in video_refusal(
        frames(3), MediaPolicy(paths=False, max_video_pixels=1200)
    )


def test_broken_video_is_read_or_refused_and_never_crashes(tmp_path: Path) -> None:
    policy = MediaPolicy(
        paths=False, max_pixels=1 << 20, max_video_frames=200, max_video_pixels=1 << 24
    )
    data = write_file(tmp_path / "clip.mp4", count=8).read_bytes()
    random_, refusals = random.Random(1), []
    for i in range(100):
        broken = bytearray(data)
        for _ in range(random_.randint(1, 20)):
            broken[random_.randrange(len(broken))] = random_.randrange(256)
        if i % 4 == 1:
            del broken[random_.randrange(40, len(broken)) :]
        try:
            load_video(bytes(broken), CONFIG, policy=policy)
        except UserError as error:
            refusals.append(str(error))
    assert 10 < len(refusals) < 90
    assert not any("\n" in message for message in refusals)


def _percent(text: str) -> str:
    return "".join(f"%{ord(character):02X}" for character in text)


@pytest.mark.parametrize(
    "form",
    [
        lambda data: "data:image/png;base64," + base64.b64encode(data).decode().rstrip("="),
        lambda data: "data:image/png;base64," + base64.urlsafe_b64encode(data).decode(),
        lambda data: "data:;base64," + base64.urlsafe_b64encode(data).decode().rstrip("="),
        lambda data: "data:image/png;base64," + _percent(base64.b64encode(data).decode()),
        lambda data: "data:image/png;base64," + quote(base64.b64encode(data).decode(), safe=""),
        lambda data: "data:image/png," + quote(data),
        lambda data: "data:," + quote(data, safe=""),
    ],
)
def test_data_uri_of_every_spelling_is_read(form: Any) -> None:
    noise = np.random.default_rng(3).integers(0, 256, (11, 13, 3), dtype=np.uint8)
    uri = form(encode(Image.fromarray(noise)))
    np.testing.assert_array_equal(np.asarray(load_image(uri, policy=SERVED)), noise)


@pytest.mark.parametrize("offset", range(3))
def test_long_percent_encoded_uri_is_read_in_little_memory(offset: int) -> None:
    data = bytes(range(256)) * 12_000
    uri = "data:," + "A%zz%4%" + "-" * offset + _percent(data.decode("latin-1"))
    tracemalloc.start()
    try:
        found = read_media(uri, "image", replace(SERVED, max_bytes=None))
        assert tracemalloc.get_traced_memory()[1] < 6 * len(uri)
    finally:
        tracemalloc.stop()
    assert found == b"A%zz%4%" + b"-" * offset + data


@pytest.mark.parametrize("text", ["!!!!", "QUJ", "QQ==QQ==", "\u00e9", "Q"])
def test_broken_base64_is_refused(text: str) -> None:
    found = refusal(f"data:image/png;base64,{text}")
    assert "base64 is broken" in found or "unknown image format" in found


def test_defaults_of_a_policy_are_those_of_the_server() -> None:
    assert MediaPolicy() == ServingConfig().media()
    assert "files are not read" in refusal("/etc/passwd", MediaPolicy())
    assert "not fetched" in refusal("http://127.0.0.1/a.png", MediaPolicy())
