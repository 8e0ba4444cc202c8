"""Clients of ``benchmarks.host``, in their own process: ``python -m benchmarks.host_clients URL``.

All send requests at once, and read their answers as they arrive.
"""

from __future__ import annotations

import asyncio

import click

from benchmarks.chat_client import ChatServer
from trt_eagle3.errors import CheckFailedError
from trt_eagle3.io.run_command import run_command

__all__ = ["main"]

PROMPT = "What does the host do?"


@click.command()
@click.argument("url")
@click.option("--clients", type=int, required=True)
@click.option("--max-tokens", type=int, required=True)
@click.option("--speculation", is_flag=True)
def main(url: str, clients: int, max_tokens: int, *, speculation: bool) -> None:
    """Send requests to the server at URL; exit with status 1 if an answer is an error."""
    asyncio.run(_ask(url, clients, max_tokens, speculation=speculation))


async def _ask(url: str, clients: int, max_tokens: int, *, speculation: bool) -> None:
    server = await ChatServer.find(url)
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "speculation": speculation,
    }
    for reply in await asyncio.gather(*(server.ask(body) for _ in range(clients))):
        if reply.error is not None:
            raise CheckFailedError(f"a client: {reply.error}")


if __name__ == "__main__":
    run_command(main)
