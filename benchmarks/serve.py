"""Cost of serving: ``python -m benchmarks.serve BUNDLE --prompts FILE``.

The same prompts run twice, at the same concurrency: from threads over an engine in this process,
and from clients of a real Triton server that streams its answers over HTTP. Prints tokens per
second of both, and the clients' time to first token and time between tokens. Both sides alternate;
per side the best round counts. Answers must have the same tokens.

``trt-eagle3 deploy`` writes the server's files; ``TRT_EAGLE3_ENV`` names its Python environment.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import itertools
import json
import os
import random
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from trt_eagle3.decode.llm import LLM, load
from trt_eagle3.decode.request.request import Request
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.io.run_command import run_command
from trt_eagle3.prompts.prompt_file import Question, read_questions
from trt_eagle3.triton.repository import deploy

__all__ = ["free_ports", "main", "prompts_option", "to_data_uri", "wait_until_ready"]

_START_S = 300.0


@dataclass(frozen=True)
class ServedReply:
    """One answer, timed at its client.

    Attributes:
        pieces: (seconds since the request, tokens) of each piece.
    """

    token_ids: tuple[int, ...]
    pieces: tuple[tuple[float, int], ...]


Ask = Callable[[Question, int, bool], ServedReply]


prompts_option = click.option(
    "--prompts",
    "file",
    required=True,
    type=click.Path(path_type=Path),
    help="Prompts, a JSON list or one per line.",
)


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@prompts_option
@click.option(
    "--concurrency", "levels", multiple=True, type=int, default=(1, 4, 8, 16), show_default=True
)
@click.option("--requests", "count", default=48, show_default=True, help="Requests per round.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--max-tokens", default=64, show_default=True)
@click.option(
    "--stream/--no-stream",
    default=True,
    show_default=True,
    help="One response per step, or one in all.",
)
@click.option(
    "--stream-interval", default=0.02, show_default=True, help="The server's stream_interval_s."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def main(
    bundle: Path,
    file: Path,
    levels: tuple[int, ...],
    count: int,
    rounds: int,
    max_tokens: int,
    stream: bool,
    stream_interval: float,
    as_json: bool,
) -> None:
    """Print throughput and latencies, served and offline, with and without speculation."""
    questions = list(itertools.islice(itertools.cycle(read_questions(file)), count))
    engine = load(bundle)
    if engine.bundle.limits.max_batch_size < max(levels):
        raise UserError(
            f"{bundle}: decodes {engine.bundle.limits.max_batch_size} at once. Rebuild with a "
            "larger limit."
        )
    rows = []
    with _server(bundle, {"stream_interval_s": stream_interval}) as port:
        name = engine.bundle.record.config.name
        sides: dict[str, Ask] = {"offline": _offline(engine), "served": _served(port, name, stream)}
        for level, speculation in itertools.product(levels, (True, False)):
            best: dict[str, Round] = {}
            for _ in range(rounds + 1):  # the first round is a warm-up
                found = {
                    side: _round(ask, questions, level, max_tokens, speculation)
                    for side, ask in sides.items()
                }
                if found["offline"].tokens != found["served"].tokens:
                    raise UserError(f"{bundle}: served and offline answers have different tokens")
                best = {
                    side: min((new, best.get(side, new)), key=lambda r: r.seconds)
                    for side, new in found.items()
                }
            rows.append(_row(level, speculation, best))
    engine.close()
    if as_json:
        click.echo(json.dumps(rows))
    else:
        _print(rows)


@dataclass(frozen=True)
class Round:
    """All replies of a round."""

    seconds: float
    replies: tuple[ServedReply, ...]

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        """Token ids of every reply."""
        return [reply.token_ids for reply in self.replies]

    @property
    def rate(self) -> float:
        """Tokens per second of all replies."""
        return sum(map(len, self.tokens)) / self.seconds

    def first_token_ms(self) -> list[float]:
        """Return the time to the first token of every reply."""
        return [1000 * reply.pieces[0][0] for reply in self.replies]

    def inter_token_ms(self) -> list[float]:
        """Return times between tokens: of each piece after the first, divided by its tokens."""
        gaps = []
        for reply in self.replies:
            for (before, _), (now, tokens) in itertools.pairwise(reply.pieces):
                gaps += [1000 * (now - before) / tokens] * tokens if tokens else []
        return gaps


def _round(
    ask: Ask, questions: Sequence[Question], level: int, max_tokens: int, speculation: bool
) -> Round:
    with ThreadPoolExecutor(level) as pool:
        start = time.perf_counter()
        replies = tuple(
            pool.map(lambda question: ask(question, max_tokens, speculation), questions)
        )
        return Round(time.perf_counter() - start, replies)


def _offline(engine: LLM) -> Ask:
    def ask(question: Question, max_tokens: int, speculation: bool) -> ServedReply:
        start, pieces = time.perf_counter(), []
        answer = engine.submit(
            Request(
                question.prompt,
                images=question.images,
                videos=question.videos,
                sampling=SamplingParams(max_tokens=max_tokens),
                speculation=speculation,
            )
        )
        for chunk in answer:
            pieces.append((time.perf_counter() - start, len(chunk.token_ids)))
        return ServedReply(answer.generation.token_ids, tuple(pieces))

    return ask


def _served(port: int, model: str, stream: bool) -> Ask:
    def ask(question: Question, max_tokens: int, speculation: bool) -> ServedReply:
        inputs: dict[str, Any] = {
            "text_input": question.prompt,
            "max_tokens": max_tokens,
            "speculation": speculation,
        }
        inputs |= {"stream": stream, "return_token_ids": True}
        if question.images:
            inputs["image_url"] = [to_data_uri(image) for image in question.images]
        if question.videos:
            inputs["video"] = [
                json.dumps([to_data_uri(f) for f in _frames(video)]) for video in question.videos
            ]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        start, ids, pieces = time.perf_counter(), [], []
        connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(inputs))
        for line in connection.getresponse():
            if line.strip():
                event = json.loads(line.decode().removeprefix("data: "))
                if "error" in event:
                    raise UserError(f"the server refuses a prompt: {event['error']}")
                new = (
                    event["token_ids"]
                    if isinstance(event["token_ids"], list)
                    else [event["token_ids"]]
                )
                ids += new
                pieces.append((time.perf_counter() - start, len(new)))
        connection.close()
        return ServedReply(tuple(ids), tuple(pieces))

    return ask


def _frames(video: Any) -> list[Any]:
    return sorted(Path(video).iterdir()) if isinstance(video, str | Path) else list(video)


def to_data_uri(image: Any) -> str:
    """Return an image file as a data URI."""
    return f"data:image/*;base64,{base64.b64encode(Path(image).read_bytes()).decode()}"


@contextmanager
def _server(bundle: Path, serving: dict[str, float]) -> Iterator[int]:
    """Run a Triton server on a fresh repository with ``bundle``; yield its HTTP port."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "server.log").open("wb") as log:
        model = deploy(bundle, Path(folder) / "repository", serving=serving).model
        ports = dict(zip(("HTTP_PORT", "GRPC_PORT", "METRICS_PORT"), free_ports(3), strict=True))
        environment = {**os.environ, **{name: str(port) for name, port in ports.items()}}
        launch = model.parent / "launch.sh"
        process = subprocess.Popen([launch], env=environment, stdout=log, stderr=log)
        try:
            wait_until_ready(process, ports["HTTP_PORT"], model.name, Path(log.name))
            yield ports["HTTP_PORT"]
        finally:
            process.terminate()
            process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], port: int, model: str, log: Path) -> None:
    """Wait until the server answers.

    Raises:
        EnvironmentMissingError: it ended, or was not ready in time.
    """
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise EnvironmentMissingError(f"the server did not start: {' '.join(last)[:300]}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", f"/v2/models/{model}/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.2)
        finally:
            connection.close()
    raise EnvironmentMissingError(f"the server was not ready after {_START_S:g} s")


_SERVER_PORTS = range(10_000, 32_768)
"""Ports below Linux' range of outgoing connections (``ip_local_port_range``).

A client that connects while a server starts cannot take the server's port.
"""


def free_ports(count: int) -> list[int]:
    """Return ports of this machine without a listener."""
    found: list[int] = []
    for port in random.sample(_SERVER_PORTS, len(_SERVER_PORTS)):
        if len(found) == count:
            break
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
    return found


def _row(level: int, speculation: bool, best: dict[str, Round]) -> dict[str, Any]:
    row: dict[str, Any] = {"concurrency": level, "speculation": speculation}
    row["served_to_offline"] = best["served"].rate / best["offline"].rate
    for side, found in best.items():
        row[f"{side}_tokens_per_second"] = found.rate
        for name, values in (
            ("first_token_ms", found.first_token_ms()),
            ("inter_token_ms", found.inter_token_ms()),
        ):
            row[f"{side}_{name}"] = (
                [float(p) for p in np.percentile(values, (50, 95, 99))] if values else None
            )
    return row


def _print(rows: Sequence[dict[str, Any]]) -> None:
    heads = ("tokens/s, served", "offline", "served / offline", "to the first offline row")
    table = Table(
        "clients",
        "speculation",
        *heads,
        "first token ms p50 / 95 / 99",
        "between tokens ms p50 / 95 / 99",
    )
    base = rows[0]["offline_tokens_per_second"]
    for row in rows:
        rates = row["served_tokens_per_second"], row["offline_tokens_per_second"]
        found = (row[f"served_{name}"] or () for name in ("first_token_ms", "inter_token_ms"))
        times = (" / ".join(f"{p:.1f}" for p in percentiles) or "-" for percentiles in found)
        ratios = f"{row['served_to_offline']:.2f}", f"{rates[0] / base:.2f}"
        on = "on" if row["speculation"] else "off"
        table.add_row(
            str(row["concurrency"]), on, *(f"{rate:.0f}" for rate in rates), *ratios, *times
        )
    Console(width=None if Console().is_terminal else 160).print(table)


if __name__ == "__main__":
    run_command(main)
