"""Load over HTTP: what clients see adds up, requests are the same for all sides, failures count."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import traffic
from benchmarks.chat_client import ChatServer, ClientReply
from benchmarks.load import LoadTarget, measure
from benchmarks.load_report import LoadReport, LoadRound, LoadSide
from benchmarks.traffic import Body, drawn_bodies, question_bodies
from tests.serving.site import Site, serving
from tests.tiny import build_tiny
from trt_eagle3.bench.workload import Load
from trt_eagle3.decode.llm import LLM, load
from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.prompts.prompt_file import Question

BODY: Body = {"messages": [{"role": "user", "content": "What is 12 plus 30?"}], "max_tokens": 9}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("engines")
    with load(build_tiny(folder, speculation={"adaptive": False})) as engine:
        yield engine


@pytest.fixture(scope="module")
def site(engine: LLM) -> Iterator[Site]:
    with serving(engine) as site:
        yield site


def bodies(count: int, seed: int, salt: int) -> Sequence[Body]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traffic, "_PROMPT_WORDS", ((2, 6),))
        patch.setattr(traffic, "_SIDES", (64,))
        patch.setattr(traffic, "_ANSWER_TOKENS", (4, 9))
        return drawn_bodies(count, seed=seed, salt=salt, images=0.5, max_tokens=18)


async def both(site: Site) -> LoadReport:
    server = await ChatServer.find(f"http://127.0.0.1:{site.port}/v1")
    targets = [
        LoadTarget("ours", server, {}),
        LoadTarget("plain", server, {"speculation": False}),
    ]
    loads = [Load(2), Load(rate=50.0)]
    return await measure(targets, loads, bodies, rounds=1, count=3, pause=0.001)


def test_both_sides_of_a_server_are_asked_the_same_and_every_token_counts(
    site: Site, engine: LLM
) -> None:
    engine.restart_metrics()
    report = asyncio.run(both(site))
    drafted = engine.metrics().proposed[0]
    found = report.to_dict()
    assert json.loads(json.dumps(found)) == found
    assert [(row["clients"], row["rate"], row["side"]) for row in found["rows"]] == [
        (2, None, "ours"),
        (2, None, "plain"),
        (None, 50.0, "ours"),
        (None, 50.0, "plain"),
    ]
    for load_, sides in report.rows.items():
        assert all(side.errors == [] for side in sides.values()), sides
        index = list(report.rows).index(load_)
        lengths = [body["max_tokens"] for body in bodies(3, 100 * index + 1, 0)]
        for side in sides.values():
            assert [reply.num_tokens for reply in side.rounds[0].replies] == lengths
    assert 0 < drafted < engine.metrics().cycles, "one side speculates, the other does not"
    shown = io.StringIO()
    Console(width=60, file=shown).print(*report.tables())
    assert "50/s" in shown.getvalue()
    assert "…" not in shown.getvalue()


def test_bodies_of_another_salt_have_the_sizes_and_nothing_else_in_common() -> None:
    one, again, other = (bodies(12, 3, salt) for salt in (0, 0, 1))
    assert one == again
    for a, b in zip(one, other, strict=True):
        left, right = (x["messages"][0]["content"] for x in (a, b))
        assert a["max_tokens"] == b["max_tokens"]
        assert [part["type"] for part in left] == [part["type"] for part in right]
        assert all(x != y for x, y in zip(left, right, strict=True))
        assert len(left[-1]["text"]) == len(right[-1]["text"])


def test_questions_become_bodies_with_data_uris(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"png")
    asked = [Question("What?", [tmp_path / "a.png"]), Question("And?"), Question("x", videos=["v"])]
    found = question_bodies(asked, 3, max_tokens=5)
    assert [len(body["messages"][0]["content"]) for body in found] == [2, 1, 2]
    with pytest.raises(UserError, match="all of them have videos"):
        question_bodies(asked[2:], 1, max_tokens=5)


def test_percentiles_are_of_pieces_and_of_tokens() -> None:
    reply = ClientReply("abc", 0.5, (0.1, 0.3), 9)
    side = LoadSide((LoadRound((reply, ClientReply("", 0.0, (), 0, "busy")), 2.0),))
    assert side.tokens_per_second == 4.5
    assert side.first_token is not None
    assert side.first_token.p99 == pytest.approx(500)
    assert side.between is not None
    assert side.between.p50 == pytest.approx(200)
    assert side.per_token is not None
    assert side.per_token.p50 == pytest.approx(50)
    assert side.errors == ["busy"]


@asynccontextmanager
async def answering(*pieces: bytes) -> AsyncIterator[ChatServer]:
    """A server that sends ``pieces`` one by one to whoever asks."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield ChatServer("127.0.0.1", port, tls=False, path="", model="m")


def ask(*pieces: bytes) -> ClientReply:
    async def run() -> ClientReply:
        async with answering(*pieces) as server:
            return await server.ask(BODY)

    return asyncio.run(run())


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(text: str | None = None, **fields: object) -> bytes:
    choices = [] if text is None else [{"delta": {"content": text}}]
    return b"data: " + json.dumps({"choices": choices, **fields}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def test_events_split_anywhere_are_read_whole() -> None:
    usage = event(usage={"completion_tokens": 7})
    body = event("") + event("a") + event("b") + usage + b"data: [DONE]\n\n"
    parts = [chunk(body[i : i + 11]) for i in range(0, len(body), 11)]
    reply = ask(CHUNKED, *parts, b"0\r\n\r\n")
    assert (reply.text, reply.num_tokens, reply.error) == ("ab", 7, None)
    assert len(reply.gaps) == 1
    assert reply.first_seconds > 0.02, "the empty first piece is no token"


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ((b"HTTP/1.1 503 Busy\r\n\r\n", b'{"error": "full"}'), "status 503: .*full"),
        ((CHUNKED, chunk(event(error="it broke")), b"0\r\n\r\n"), "it broke"),
        ((CHUNKED, chunk(event("a"))), "IncompleteReadError"),
        ((CHUNKED, chunk(event("a")), b"0\r\n\r\n"), "without usage"),
        ((b"nonsense\r\n\r\n",), "Error"),
    ],
)
def test_what_is_no_answer_is_an_error_of_that_request(
    pieces: tuple[bytes, ...], message: str
) -> None:
    reply = ask(*pieces)
    assert reply.error is not None
    assert re.search(message, reply.error)


def test_nobody_there_and_no_url_are_one_line() -> None:
    with pytest.raises(EnvironmentMissingError, match="no OpenAI-compatible server answers"):
        asyncio.run(ChatServer.find("http://127.0.0.1:1"))
    with pytest.raises(UserError, match="expected a URL such as"):
        asyncio.run(ChatServer.find("ours"))
