"""A bundle's plain against its speculative decoding: ``python -m trt_eagle3.bench.pair BUNDLE --prompts FILE``.

The file's form is in ``trt_eagle3/prompts.py``. One process, both sides alternating over the prompts, the first round
not counted.
"""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from trt_eagle3.decode.engine import Engine, load
from trt_eagle3.decode.request import Generation
from trt_eagle3.errors import UserError
from trt_eagle3.prompts import read_questions

__all__ = ["main"]


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompts", "file", required=True, type=click.Path(path_type=Path), help="JSON list of prompts.")
@click.option("--rounds", default=5, show_default=True, help="Counted rounds.")
@click.option("--max-tokens", default=128, show_default=True)
def main(bundle: Path, file: Path, rounds: int, max_tokens: int) -> None:
    """Print tokens per second of both, their ratio, and the acceptance."""
    engine = load(bundle)
    questions = read_questions(file)
    runs: dict[bool, list[Generation]] = {False: [], True: []}
    for number in range(rounds + 1):
        for q in questions:
            for speculation, found in runs.items():
                answer = engine.generate(
                    q.prompt, images=q.images, videos=q.videos, max_tokens=max_tokens, speculation=speculation
                )
                if number:
                    found.append(answer)
    if any(a.token_ids != b.token_ids for a, b in zip(runs[False], runs[True], strict=True)):
        raise UserError(f"{bundle}: speculative and plain decoding gave different tokens")
    _print(engine, runs)


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
