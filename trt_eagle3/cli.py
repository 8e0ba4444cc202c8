"""The command line: parse, call, print. No logic."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from trt_eagle3 import bench as bench_defaults
from trt_eagle3.commands.run_command import run_command
from trt_eagle3.errors import UserError
from trt_eagle3.parity import SUITES
from trt_eagle3.probe import MAX_TOKENS

__all__ = ["cli", "main"]

_log = Console(stderr=True, highlight=False)
_out = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
_set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Override a field of the draft manifest.",
)
_json_option = click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on stdout; logs on stderr."
)


def main() -> None:
    """Entry point."""
    run_command(cli)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="trt-eagle3")
def cli() -> None:
    """Qwen3-VL and Qwen3 with EAGLE-3 drafts: compile, prove, deploy."""


@cli.command()
@click.argument("target")
@click.argument("draft", required=False)
@_set_option
@_json_option
def inspect(target: str, draft: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Say what these checkpoints are: geometry, draft manifest, refusals."""
    from trt_eagle3.checkpoint.draft import read_draft
    from trt_eagle3.checkpoint.source import resolve_checkpoint
    from trt_eagle3.commands import report
    from trt_eagle3.config import parse_overrides
    from trt_eagle3.families.registry import read_target

    if overrides and draft is None:
        raise UserError(
            f"--set {overrides[0]}: a field of a draft, and no draft given. Name one, or leave it "
            "out."
        )
    spec = read_target(resolve_checkpoint(target))
    manifest = (
        read_draft(resolve_checkpoint(draft), spec, parse_overrides(overrides))
        if draft is not None
        else None
    )
    if as_json:
        _print_json(report.inspection(spec, manifest))
    else:
        _out.print(*report.inspection_lines(spec, manifest), sep="\n", soft_wrap=True, markup=False)


@cli.command()
@click.option(
    "--config",
    "config_file",
    required=True,
    type=click.Path(path_type=Path),
    help="Build config, YAML.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Folder for the bundle, instead of the config's.",
)
@click.option(
    "--weights",
    type=click.Choice(["contained", "reference"]),
    default="contained",
    show_default=True,
    help=(
        "contained: reflink, hard link or copy into the bundle; reference: leave them where they "
        "are."
    ),
)
@_set_option
@_json_option
def build(
    config_file: Path, output: Path | None, weights: str, overrides: tuple[str, ...], as_json: bool
) -> None:
    """Turn a checkpoint pair into a bundle."""
    from trt_eagle3.commands import report
    from trt_eagle3.config import load_config, parse_overrides
    from trt_eagle3.pipeline import build as run

    config = load_config(config_file, parse_overrides(overrides))
    with _stages() as (begin, show):
        result = run(
            config,
            output=output,
            config_file=config_file,
            reference_weights=weights == "reference",
            progress=begin,
            show=show,
        )
    if as_json:
        _print_json(report.build(result))
    else:
        _out.print(*report.build_lines(result), sep="\n", soft_wrap=True, markup=False)


@cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt")
@click.option(
    "--image", "images", multiple=True, help="An image file or data URI; may be repeated."
)
@click.option("--video", "videos", multiple=True, help="A folder of frames or a file.")
@click.option("--max-tokens", default=256, show_default=True, help="At most this many new tokens.")
@click.option("--temperature", default=0.0, show_default=True, help="Of sampling; 0 is greedy.")
@click.option(
    "--top-k", default=0, show_default=True, help="Sample from the likeliest tokens only; 0 is all."
)
@click.option(
    "--top-p", default=1.0, show_default=True, help="Sample from the likeliest tokens of this mass."
)
@click.option(
    "--min-p",
    default=0.0,
    show_default=True,
    help="Sample from tokens of this share of the likeliest.",
)
@click.option(
    "--repetition-penalty", default=1.0, show_default=True, help="Of tokens in prompt or answer."
)
@click.option("--presence-penalty", default=0.0, show_default=True, help="Of tokens in the answer.")
@click.option("--seed", type=int, help="Of the random numbers: the same seed, the same answer.")
@click.option("--stop", multiple=True, help="A text that ends the answer; may be repeated.")
@click.option("--no-speculation", is_flag=True, help="Decode plainly; the answer is the same.")
@click.option("--stats", is_flag=True, help="Print speed and acceptance after the answer.")
@_json_option
def generate(
    bundle: Path, prompt: str, as_json: bool, stats: bool, no_speculation: bool, **options: Any
) -> None:
    """Answer PROMPT with BUNDLE, streaming the text."""
    from trt_eagle3.commands import report
    from trt_eagle3.decode.llm import load
    from trt_eagle3.decode.sampling_params import SamplingParams

    sampling = SamplingParams(
        **{
            field.name: options.pop(field.name)
            for field in dataclasses.fields(SamplingParams)
            if field.name in options
        }
    )
    answer = load(bundle).stream(
        prompt, sampling=sampling, speculation=not no_speculation, **options
    )
    for chunk in answer:
        if not as_json:
            click.echo(chunk.text, nl=False)
    if as_json:
        _print_json(dataclasses.asdict(answer.generation))
        return
    click.echo()
    if stats:
        _log.print(report.generation_line(answer.generation))


@cli.command()
@click.argument(
    "bundles", nargs=-1, required=True, metavar="BUNDLE [BUNDLE]", type=click.Path(path_type=Path)
)
@click.option(
    "--suite",
    type=click.Choice(SUITES),
    default="quick",
    show_default=True,
    help="The bundled prompts.",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help="JSON list of prompts, instead of the bundled ones.",
)
@click.option(
    "--compare", is_flag=True, help="Two bundles A B: hold B against A instead of PyTorch."
)
@click.option(
    "--target-only",
    is_flag=True,
    help="With --compare: leave the drafts out, as where only one has one.",
)
@click.option("--target", help="The target's checkpoint, if it is not where the build found it.")
@click.option("--draft", help="The draft's checkpoint, likewise.")
@click.option(
    "--thresholds", type=click.Path(path_type=Path), help="YAML mapping of tolerances to values."
)
@click.option("--float64", is_flag=True, help="Compute the reference in float64; for small models.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Folder for the report, instead of BUNDLE/parity.",
)
@click.option("--junit", type=click.Path(path_type=Path), help="Write the checks as JUnit XML too.")
@_json_option
def validate(
    bundles: tuple[Path, ...],
    output: Path | None,
    junit: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Prove that BUNDLE computes what PyTorch computes; exit status 1 if a check fails."""
    from trt_eagle3.parity.report.files import check_writable, write_junit, write_report
    from trt_eagle3.parity.run import run_validation

    check_writable((output or bundles[-1] / "parity") / "report.json", *([junit] if junit else []))
    with _bars() as progress:
        result = run_validation(bundles, progress=progress, **options)
    files = write_report(result, output) + ((write_junit(result, junit),) if junit else ())
    if as_json:
        click.echo(result.to_json())
    else:
        _out.print(result.table())
        _out.print(*result.lines(files), sep="\n", soft_wrap=True, markup=False)
    result.check()


@cli.command()
@click.argument("path")
@click.argument("draft", required=False)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help="JSON list of prompts, instead of the bundled ones.",
)
@click.option(
    "--max-tokens",
    default=MAX_TOKENS,
    show_default=True,
    help="At most this many tokens per answer.",
)
@_set_option
@_json_option
def probe(
    path: str, draft: str | None, overrides: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Measure which interpretation of a draft fits its target:

    PATH is a bundle, or a target followed by its DRAFT.
    """
    from trt_eagle3.config import parse_overrides
    from trt_eagle3.probe.run import probe as run

    with _bars() as progress:
        result = run(
            path, draft, overrides=parse_overrides(overrides), progress=progress, **options
        )
    if as_json:
        _print_json(result.to_dict())
    else:
        _out.print(result.table())
        _out.print(*result.verdict_lines(), sep="\n", soft_wrap=True, markup=False)
    result.check()


def _numbers(
    kind: type[int] | type[float],
) -> Callable[[click.Context, click.Parameter, str], tuple[float, ...]]:
    """Reads an option's numbers above zero, with commas between them."""

    def read(_context: click.Context, _option: click.Parameter, value: str) -> tuple[float, ...]:
        try:
            numbers = tuple(kind(word) for word in value.split(",")) if value else ()
        except ValueError:
            numbers = (0,)
        if not all(0 < number < 1 << 24 for number in numbers):
            raise click.BadParameter(
                f"expected numbers above 0 with commas between them, got {value!r}"
            )
        return numbers

    return read


@cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help="JSON list of prompts, instead of the bundled ones.",
)
@click.option(
    "--batch",
    "batches",
    metavar="N,N,...",
    default="",
    callback=_numbers(int),
    help="In flight. [default: 1,2,4,8]",
)
@click.option(
    "--rate",
    "rates",
    metavar="R,R,...",
    default="",
    callback=_numbers(float),
    help="Poisson arrivals per second.",
)
@click.option(
    "--requests",
    type=click.IntRange(1),
    help="Per round and load.  [default: 4 x batch, each prompt once]",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=bench_defaults.ROUNDS,
    show_default=True,
    help="That count.",
)
@click.option(
    "--max-tokens", type=click.IntRange(2), default=bench_defaults.MAX_TOKENS, show_default=True
)
@click.option("--ignore-eos", is_flag=True, help="Answers of --max-tokens tokens.")
@click.option("--prefix-cache", is_flag=True, help="Reuse KV pages of prompts that came before.")
@click.option(
    "--tune",
    is_flag=True,
    help="First find what number of draft tokens pays; write it into BUNDLE.",
)
@click.option("--plot", type=click.Path(path_type=Path), help="Write a plot: .png, .svg or .pdf.")
@click.option(
    "--images",
    is_flag=True,
    help="Instead: time to the first token of prompts with images and videos.",
)
@click.option(
    "--against", type=click.Choice(["transformers"]), help="With --images: measure this beside it."
)
@_json_option
def bench(
    bundle: Path,
    tune: bool,
    plot: Path | None,
    images: bool,
    against: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Plain against speculative decoding of BUNDLE, by requests in flight.

    Kernels alone: plugins/bench/kernels.py. Big pairs with random weights: python -m
    trt_eagle3.bench.gpu
    """
    if images:
        _bench_images(bundle, against, as_json)
        return
    if against is not None:
        raise UserError(f"--against {against}: measured with --images only. Add --images.")
    from trt_eagle3.bench.result import check_plot
    from trt_eagle3.bench.run import bench as run
    from trt_eagle3.bench.tune import tune as run_tune

    shared = {name: options[name] for name in ("prompts", "batches", "rounds", "max_tokens")}
    if plot is not None:
        check_plot(plot)
    with _bars() as progress:
        tuning = run_tune(bundle, progress=progress, **shared) if tune else None
        result = run(bundle, progress=progress, **options)
    if as_json:
        _print_json({**result.to_dict(), **({"tuning": tuning.to_dict()} if tuning else {})})
    else:
        _out.print(*(tuning.tables() if tuning else ()), *result.tables())
        _out.print(*result.lines(), sep="\n", soft_wrap=True, markup=False)
    if plot is not None:
        result.plot(plot)


def _bench_images(bundle: Path, against: str | None, as_json: bool) -> None:
    from trt_eagle3.bench.first_token import first_token

    with _bars() as progress:
        result = first_token(bundle, against=against, progress=progress)
    if as_json:
        _print_json(result.to_dict())
    else:
        _out.print(
            result.table(), *(f"left out: {case}: {why}" for case, why in result.left_out.items())
        )


@cli.command("convert-draft")
@click.argument("source")
@click.argument("destination", type=click.Path(path_type=Path))
@click.option(
    "--to",
    required=True,
    type=click.Choice(["specforge", "speculators", "modelopt", "tensorrt-llm"]),
    help="Layout.",
)
@click.option("--target", help="The draft's target, where a default follows from it.")
@_set_option
@_json_option
def convert_draft(
    source: str,
    destination: Path,
    to: Any,
    target: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write the draft SOURCE to DESTINATION in another producer's layout, its meaning and
    weights intact.
    """
    from trt_eagle3.checkpoint.convert import convert_draft as run
    from trt_eagle3.checkpoint.draft import read_draft
    from trt_eagle3.checkpoint.source import resolve_checkpoint
    from trt_eagle3.config import parse_overrides
    from trt_eagle3.families.registry import read_target

    spec = read_target(resolve_checkpoint(target)) if target else None
    manifest = read_draft(resolve_checkpoint(source), spec, parse_overrides(overrides))
    notes = run(manifest, destination, to)
    if as_json:
        _print_json({"destination": str(destination), "layout": to, "notes": list(notes)})
    else:
        _out.print(
            f"wrote {destination} ({to})",
            *(f"note: {note}" for note in notes),
            sep="\n",
            soft_wrap=True,
        )


@cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--repository", required=True, type=click.Path(path_type=Path), help="Folder to write to."
)
@click.option(
    "--target", type=click.Choice(["triton", "tensorrt-llm"]), default="triton", show_default=True
)
@click.option("--name", help="triton: what requests call the model; the bundle's name by default.")
@click.option(
    "--env",
    "environment",
    help="triton: whose Python runs it: server, interpreter, or a packed .tar.gz.",
)
@click.option("--image", help="triton: the Triton image that containers are built on.")
@click.option(
    "--set", "serving", multiple=True, metavar="FIELD=VALUE", help="triton: a limit on requests."
)
@click.option("--runtime-version", help="tensorrt-llm: its version, 1.2 or 1.4.")
@click.option("--tensor-parallel-size", type=int, help="tensorrt-llm: GPUs that share the target.")
@_json_option
def deploy(bundle: Path, repository: Path, target: str, as_json: bool, **options: Any) -> None:
    """Write a Triton model repository with BUNDLE in it, or the input of TensorRT-LLM's runtime."""
    from trt_eagle3.config import parse_overrides
    from trt_eagle3.triton.repository import deploy as to_triton
    from trt_eagle3.trtllm.bundle import deploy as to_trtllm

    options["serving"] = parse_overrides(options["serving"])
    given = {name: value for name, value in options.items() if value not in (None, {})}
    run: Callable[..., Any] = to_triton if target == "triton" else to_trtllm
    if foreign := sorted(given.keys() - signature(run).parameters.keys()):
        raise UserError(f"--target {target}: has no use for {foreign[0]}. Leave it out.")
    result = run(bundle, repository, **given)
    if as_json:
        _print_json(result.to_dict())
    else:
        _out.print(*result.lines(), sep="\n", soft_wrap=True, markup=False)


@cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; 0.0.0.0 is everybody.",
)
@click.option(
    "--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="To listen on."
)
@click.option(
    "--api-key",
    envvar="TRT_EAGLE3_API_KEY",
    help="What clients must send; better as TRT_EAGLE3_API_KEY.",
)
@click.option("--set", "limits", multiple=True, metavar="FIELD=VALUE", help="A limit on requests.")
def serve(bundle: Path, limits: tuple[str, ...], **options: Any) -> None:
    """Serve BUNDLE to OpenAI clients: /v1/chat/completions, /health, /metrics."""
    from trt_eagle3.config import parse_overrides
    from trt_eagle3.serving import ServingConfig
    from trt_eagle3.serving.server import serve as run

    run(bundle, serving=ServingConfig.from_mapping(parse_overrides(limits), "--set"), **options)


@cli.command()
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@_json_option
def doctor(bundle: Path | None, as_json: bool) -> None:
    """Say what is installed, what works and what is missing; with BUNDLE, whether it would run
    here.
    """
    from trt_eagle3.commands.doctor import check_bundle, diagnose
    from trt_eagle3.config import EngineConfig
    from trt_eagle3.engine.bundle import read_bundle

    record = read_bundle(bundle) if bundle else None
    found = diagnose(record.config.engine if record else None)
    if as_json:
        _print_json(found.to_dict())
    else:
        _out.print(*found.tables(), sep="\n\n")
    if bundle and record:
        check_bundle(bundle, record, found)
    else:
        found.check_engine(EngineConfig())


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, ensure_ascii=False))


@contextmanager
def _stages() -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """A spinner per stage on a terminal, and how far a long one is; silence when piped."""
    columns = (
        SpinnerColumn(finished_text="[green]ok[/]"),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=_log, disable=not _log.is_terminal) as progress:
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
def _bars() -> Iterator[Callable[[str, int, int], None]]:
    """A bar per stage on a terminal; silence when piped."""
    with Progress(console=_log, disable=not _log.is_terminal) as progress:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage)
            progress.update(tasks[stage], completed=done, total=total)

        yield show
