"""Load over HTTP: ``python -m benchmarks.load --server ours=http://127.0.0.1:8000``.

Clients of OpenAI-compatible servers that stream their answers. Measured: tokens per second, time to
the first piece, time between pieces. Each client pauses for a random time (exponentially
distributed) before each request, so that requests arrive at random. With ``--rate`` they arrive as
a Poisson process, however many are waiting. Several servers of any make get the same requests in
turn; their order alternates between rounds. ``--plain`` measures one of our servers without
speculation.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks.chat_client import ChatServer, ClientReply
from benchmarks.load_report import LoadReport, LoadRound, rows_of
from benchmarks.traffic import MAX_WORDS, Bodies, Body, body_source
from trt_eagle3.bench.workload import Load, pauses
from trt_eagle3.errors import UserError
from trt_eagle3.io.run_command import run_command
from trt_eagle3.prompts.prompt_file import read_questions

__all__ = ["LoadTarget", "main", "measure"]

_CLIENTS = (1, 8, 32, 64, 128)
_PER_CLIENT = 3  # requests of a client in a round
_FEWEST = 12


@dataclass(frozen=True)
class LoadTarget:
    """A server, and the fields that it adds to every request."""

    name: str
    server: ChatServer
    extra: Mapping[str, Any]


@click.command()
@click.option("--server", "servers", multiple=True, metavar="NAME=URL", help="A server.")
@click.option("--plain", multiple=True, metavar="NAME=URL", help="Ours, without speculation.")
@click.option("--clients", multiple=True, type=click.IntRange(1), help="[default: 1 8 32 64 128]")
@click.option("--rate", "rates", multiple=True, type=float, help="Poisson arrivals per second.")
@click.option("--pause", default=0.2, show_default=True, help="Mean seconds before a request.")
@click.option("--prompts", "file", type=click.Path(path_type=Path), help="Default: random ones.")
@click.option("--images", default=0.3, show_default=True, help="Share of requests with an image.")
@click.option("--requests", "count", type=click.IntRange(1), help="Per round.  [default: 3 each]")
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True)
@click.option("--max-tokens", type=click.IntRange(2), default=256, show_default=True)
@click.option("--max-words", type=click.IntRange(10), default=MAX_WORDS, show_default=True)
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Sent as a bearer token.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def main(
    servers: Sequence[str],
    plain: Sequence[str],
    clients: Sequence[int],
    rates: Sequence[float],
    file: Path | None,
    images: float,
    max_tokens: int,
    max_words: int,
    api_key: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Send the same requests under the same loads to all servers, and print their latencies."""
    bodies = body_source(
        read_questions(file) if file else None,
        images=images,
        max_tokens=max_tokens,
        max_words=max_words,
    )

    async def run() -> LoadReport:
        targets = [await _target(word, api_key, {}) for word in servers]
        targets += [await _target(word, api_key, {"speculation": False}) for word in plain]
        loads = [Load(rate=rate) for rate in rates] or [Load(size) for size in clients or _CLIENTS]
        return await measure(targets, loads, bodies, **options)

    report = asyncio.run(run())
    if as_json:
        click.echo(json.dumps(report.to_dict()))
    else:
        console = Console(width=None if Console().is_terminal else 160, highlight=False)
        console.print(*report.tables())
        console.print(*report.lines(), sep="\n", soft_wrap=True, markup=False)


async def measure(
    targets: Sequence[LoadTarget],
    loads: Sequence[Load],
    bodies: Bodies,
    *,
    rounds: int = 2,
    count: int | None = None,
    pause: float = 0.2,
) -> LoadReport:
    """Run every load on every target, round by round; the first round of each load is not counted.

    Raises:
        UserError: there is no target, or two have the same name.
    """
    names = [target.name for target in targets]
    if not names or len(set(names)) < len(names):
        raise UserError("--server, --plain: give at least one, each with its own name")
    found: dict[tuple[Load, str], list[LoadRound]] = {(x, n): [] for x in loads for n in names}
    for index, load in enumerate(loads):
        for number in range(rounds + 1):
            size, seed = count or max(_FEWEST, _PER_CLIENT * load.concurrency), 100 * index + number
            for target in targets if number % 2 else targets[::-1]:
                asked = bodies(size, seed, _salt(target, targets))
                answers = await _round(target, asked, load, pause, seed)
                if number:
                    found[load, target.name].append(answers)
    return LoadReport({"rounds": rounds, "pause_s": pause}, rows_of(found))


def _salt(target: LoadTarget, targets: Sequence[LoadTarget]) -> int:
    """Return different numbers for targets that share a server, whose caches they would share."""
    sharing = [other.name for other in targets if other.server == target.server]
    return sharing.index(target.name)


async def _target(word: str, api_key: str | None, extra: Mapping[str, Any]) -> LoadTarget:
    name, equals, url = word.partition("=")
    if not equals:
        raise UserError(f"{word}: expected NAME=URL, for example ours=http://127.0.0.1:8000")
    return LoadTarget(name, await ChatServer.find(url, api_key), extra)


async def _round(
    target: LoadTarget, bodies: Sequence[Body], load: Load, pause: float, seed: int
) -> LoadRound:
    """Send all requests once; failed requests are counted, and the rest continue."""
    replies: dict[int, ClientReply] = {}
    jobs = iter(list(enumerate(bodies)))
    start = time.perf_counter()

    async def ask(index: int, body: Body) -> None:
        replies[index] = await target.server.ask({**body, **target.extra})

    async def client(number: int) -> None:
        waits = pauses(1000 * seed + number, pause)
        for index, body in jobs:
            await asyncio.sleep(next(waits))
            await ask(index, body)

    if load.rate is None:
        await asyncio.gather(*(client(number) for number in range(load.concurrency)))
    else:
        await _poisson(jobs, ask, pauses(seed, 1 / load.rate))
    seconds = time.perf_counter() - start
    return LoadRound(tuple(replies[index] for index in range(len(bodies))), seconds)


async def _poisson(
    jobs: Iterator[tuple[int, Body]], ask: Callable[[int, Body], Any], waits: Iterator[float]
) -> None:
    due, tasks = time.perf_counter(), []
    for index, body in jobs:
        due += next(waits)
        await asyncio.sleep(max(due - time.perf_counter(), 0.0))
        tasks.append(asyncio.ensure_future(ask(index, body)))
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    run_command(main)
