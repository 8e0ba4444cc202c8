"""Share consoles, arguments, options, progress and JSON output among the commands."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from trt_eagle3.io.terminal_text import TextTable, wrapped

__all__ = [
    "bars",
    "bundle_argument",
    "built_bundle",
    "cache_option",
    "draft_option",
    "json_option",
    "log",
    "numbers",
    "print_json",
    "prompts_option",
    "override_option",
    "set_option",
    "show",
    "stages",
    "target_argument",
    "tensor_parallel_option",
]


_PIPE_WIDTH = 80


def _width(stream: TextIO | None) -> int | None:
    """Return None for a terminal, whose own width counts, and the width of files and pipes.

    The latter is ``COLUMNS``, by default 80, however wide the terminal beside the pipe is.
    ``stream`` is None if it is closed.
    """
    if stream is not None and stream.isatty():
        return None
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) > 0 else _PIPE_WIDTH


log = Console(stderr=True, highlight=False, width=_width(sys.stderr))
out = Console(highlight=False, width=_width(sys.stdout))
bundle_argument = click.argument("bundle", type=click.Path(path_type=Path))
target_argument = click.argument("target", metavar="TARGET")
draft_option = click.option(
    "--draft", help="TARGET is a checkpoint: draft with this checkpoint, or with its own mtp head."
)
cache_option = click.option(
    "--cache",
    type=click.Path(path_type=Path),
    help="TARGET is a checkpoint: build into this folder.  [default: bundles in TRT_EAGLE3_CACHE, "
    "else in ~/.cache/trt-eagle3]",
)
tensor_parallel_option = click.option(
    "--tensor-parallel",
    type=int,
    help="Share the target among this many devices of this machine: 1, 2, 4 or 8 (torch only).  "
    "[default: as built]",
)
prompts_option = click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help="Use the prompts of this file, JSON or one per line, instead of the bundle's.",
)
override_option = click.option(
    "--override",
    "overrides",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Set a field of the draft manifest to VALUE; may be repeated.",
)


def set_option(help: str) -> Callable[[Any], Any]:
    """Make the option --set KEY=VALUE of a command's config."""
    return click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help=help)


def built_bundle(
    target: str, draft: str | None, settings: Mapping[str, Any], cache: Path | None
) -> Path:
    """Return the bundle of TARGET, built on the way from a checkpoint; print what was done."""
    from trt_eagle3.bundle_cache import bundle_of

    def announce(text: str) -> None:
        show(text, to=log)

    return bundle_of(target, draft, settings, cache=cache, announce=announce, origin="--set")


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout, and logs on stderr."
)


def numbers(
    kind: type[int] | type[float],
) -> Callable[[click.Context, click.Parameter, str], tuple[float, ...]]:
    """Return a callback that parses comma-separated numbers above zero."""

    def read(_context: click.Context, _option: click.Parameter, value: str) -> tuple[float, ...]:
        try:
            numbers = tuple(kind(word) for word in value.split(",")) if value else ()
        except ValueError:
            numbers = (0,)
        if not all(0 < number < 1 << 24 for number in numbers):
            raise click.BadParameter(f"expected comma-separated numbers above 0, got {value!r}")
        return numbers

    return read


def show(*parts: str | TextTable, to: Console = out) -> None:
    """Print texts and tables, each from a line of its own, in the width of the console.

    Texts have no markup and break at spaces. Paths, URLs and commands stay whole.
    """
    for part in parts:
        lines = [part] if isinstance(part, TextTable) else wrapped(part, to.width)
        for line in lines:
            to.print(line, soft_wrap=True, markup=False)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, ensure_ascii=False))


@contextmanager
def stages() -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Show a spinner per stage and its progress on a terminal; print nothing when piped."""
    columns = (
        SpinnerColumn(finished_text="[green]ok[/]"),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=log, disable=not log.is_terminal) as progress:
        running: list[Any] = []

        def begin(stage: str) -> None:
            if running:
                progress.update(running[-1], total=1, completed=1)
            running.append(progress.add_task(stage, total=None))

        def show(what: str) -> None:
            progress.update(running[-1], description=what)

        yield begin, show
        progress.update(running[-1], total=1, completed=1)


@contextmanager
def bars() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar per stage on a terminal; print nothing when piped."""
    with Progress(console=log, disable=not log.is_terminal) as progress:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage)
            progress.update(tasks[stage], completed=done, total=total)

        yield show
