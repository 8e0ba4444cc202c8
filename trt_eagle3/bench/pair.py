"""A bundle's plain against its speculative decoding: ``python -m trt_eagle3.bench.pair BUNDLE --prompts FILE``.

The file is a JSON list of ``{"prompt": ..., "images": [...], "frames": [...]}``; paths are relative to it. One process,
both sides alternating over the prompts, the first round not counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from trt_eagle3.decode.engine import Engine, Generation, load
from trt_eagle3.errors import UserError

__all__ = ["main"]


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompts", "file", required=True, type=click.Path(path_type=Path), help="JSON list of prompts.")
@click.option("--rounds", default=5, show_default=True, help="Counted rounds.")
@click.option("--max-tokens", default=128, show_default=True)
def main(bundle: Path, file: Path, rounds: int, max_tokens: int) -> None:
    """Print tokens per second of both, their ratio, and the acceptance."""
    engine = load(bundle)
    prompts = list(_prompts(file))
    runs: dict[bool, list[Generation]] = {False: [], True: []}
    for number in range(rounds + 1):
        for prompt in prompts:
            for speculation, found in runs.items():
                answer = engine.generate(**prompt, max_tokens=max_tokens, speculation=speculation)
                if number:
                    found.append(answer)
    if any(a.token_ids != b.token_ids for a, b in zip(runs[False], runs[True], strict=True)):
        raise UserError(f"{bundle}: speculative and plain decoding gave different tokens")
    _print(engine, runs)


def _prompts(file: Path) -> Iterator[dict[str, Any]]:
    for entry in json.loads(file.read_text(encoding="utf-8")):
        frames = [file.parent / name for name in entry.get("frames", ())]
        images = [file.parent / name for name in entry.get("images", ())]
        yield {"prompt": entry["prompt"], "images": images, "videos": [frames] if frames else []}


def _print(engine: Engine, runs: dict[bool, list[Generation]]) -> None:
    table = Table(engine.record.config.name, "tokens/s", "ratio", "acceptance length")
    rates = {speculation: _rate(found) for speculation, found in runs.items()}
    for speculation, found in runs.items():
        lengths = [n for g in found for n in g.accepted_lengths]
        name = "speculative" if speculation else "plain"
        ratio = rates[speculation] / rates[False]
        table.add_row(name, f"{rates[speculation]:.0f}", f"{ratio:.2f}", f"{sum(lengths) / len(lengths):.2f}")
    Console().print(table)


def _rate(found: list[Generation]) -> float:
    """Tokens after the first, per second of decoding them."""
    timed = [(len(g.token_ids) - 1, g.tokens_per_second) for g in found if g.tokens_per_second]
    return sum(n for n, _ in timed) / sum(n / rate for n, rate in timed)


if __name__ == "__main__":
    main()
