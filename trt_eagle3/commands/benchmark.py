"""Measure the speed of a bundle (``bench``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from trt_eagle3 import bench as bench_defaults
from trt_eagle3.bench.peers import PEER_NAMES, START_S
from trt_eagle3.commands.console import (
    bars,
    bundle_argument,
    json_option,
    log,
    numbers,
    print_json,
    prompts_option,
    show,
    tensor_parallel_option,
)
from trt_eagle3.errors import UserError

__all__ = ["bench"]

_PeerValues = tuple[str, Path | None, Path | None, Path | None, Path | None, float]
"""Fields of ``PeerOptions``, whose module is imported only when needed."""


@click.command()
@bundle_argument
@prompts_option
@click.option(
    "--batch",
    "batches",
    metavar="N,N,...",
    default="",
    callback=numbers(int),
    help="Keep this many requests in flight.  [default: 1,2,4,8]",
)
@click.option(
    "--rate",
    "rates",
    metavar="R,R,...",
    default="",
    callback=numbers(float),
    help="Send this many requests per second instead (Poisson arrivals).",
)
@click.option(
    "--requests",
    metavar="N[,N,...]",
    default="",
    callback=numbers(int),
    help="Send this many requests per round: one number, or one per load.  [default: 4 x batch, at "
    "least each prompt once]",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=bench_defaults.ROUNDS,
    show_default=True,
    help="Measure this many rounds after one warm-up round.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(2),
    default=bench_defaults.MAX_TOKENS,
    show_default=True,
    help="Generate at most this many tokens per answer.",
)
@click.option(
    "--ignore-eos",
    is_flag=True,
    help="Ignore end tokens: every answer has --max-tokens tokens.",
)
@click.option("--prefix-cache", is_flag=True, help="Reuse KV pages of earlier prompts.")
@click.option(
    "--tune",
    is_flag=True,
    help="First measure the time of a step by tree and batch size, and write it into BUNDLE.",
)
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Write a plot to this .png, .svg or .pdf file."
)
@click.option(
    "--images",
    is_flag=True,
    help="Measure the time to the first token of prompts with images and videos instead.",
)
@click.option(
    "--against",
    metavar="|".join(PEER_NAMES),
    help="Compare with this engine, on the same checkpoints.",
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="The peer's target checkpoint, if the one of BUNDLE's build has moved.",
)
@click.option(
    "--draft-checkpoint",
    "draft",
    type=click.Path(path_type=Path),
    help="The peer's draft checkpoint, if the one of BUNDLE's build has moved.",
)
@click.option(
    "--peer-python",
    "python",
    type=click.Path(path_type=Path),
    help="Run the peer with this Python.  [default: this one]",
)
@click.option(
    "--peer-log",
    "peer_log",
    type=click.Path(path_type=Path),
    help="Write the peer's output into this folder, one file per process.",
)
@click.option(
    "--peer-start",
    "start_seconds",
    type=click.FloatRange(1.0),
    default=START_S,
    show_default=True,
    help="Time limit for the peer's start, in seconds.",
)
@click.option(
    "--first-token",
    type=click.Path(path_type=Path),
    multiple=True,
    help="With --against: also time the first token of each prompt in this file, one at a time; "
    "may be repeated.",
)
@tensor_parallel_option
@json_option
def bench(
    bundle: Path,
    tune: bool,
    plot: Path | None,
    images: bool,
    against: str | None,
    checkpoint: Path | None,
    draft: Path | None,
    python: Path | None,
    peer_log: Path | None,
    start_seconds: float,
    first_token: Sequence[Path],
    tensor_parallel: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure BUNDLE with and without speculation.

    The load is requests in flight, or requests per second with --rate. In a checkout of the
    project, plugins/bench/kernels.py measures kernels alone, and python -m benchmarks.gpu measures
    large pairs with random weights.
    """
    if against is None and (checkpoint or draft or python or peer_log or first_token):
        raise UserError(
            "--checkpoint, --draft-checkpoint, --peer-python, --peer-log and --first-token: only "
            "with --against"
        )
    if tensor_parallel is not None and (images or against):
        raise UserError("--tensor-parallel: not with --images or --against. Leave it out.")
    peer = (against, checkpoint, draft, python, peer_log, start_seconds) if against else None
    if images:
        _bench_images(bundle, peer, as_json)
    elif peer:
        options["first_token"] = first_token
        _bench_against(bundle, peer, as_json, tune=tune, plot=plot, **options)
    else:
        options["tensor_parallel"] = tensor_parallel
        _bench_alone(bundle, as_json, tune=tune, plot=plot, **options)


def _bench_alone(
    bundle: Path, as_json: bool, *, tune: bool, plot: Path | None, **options: Any
) -> None:
    from trt_eagle3.bench.result import check_plot
    from trt_eagle3.bench.run import bench as run
    from trt_eagle3.bench.tune import tune as run_tune

    names = ("prompts", "batches", "rounds", "tensor_parallel")
    shared = {name: options[name] for name in names}
    if plot is not None:
        check_plot(plot)
    with bars() as progress:
        tuning = run_tune(bundle, progress=progress, **shared) if tune else None
        result = run(bundle, progress=progress, **options)
    if plot is not None:
        result.plot(plot)
    if as_json:
        written = {"tuning": tuning.to_dict()} if tuning else {}
        print_json({**result.to_dict(), **written, **({"plot": str(plot)} if plot else {})})
    else:
        show(*(tuning.tables() if tuning else ()), *result.tables())
        files = [str(file) for file in (tuning and tuning.file, plot) if file]
        wrote = [f"wrote {file}" for file in files]
        show(*result.lines(), *wrote)


def _bench_against(
    bundle: Path,
    peer: _PeerValues,
    as_json: bool,
    *,
    tune: bool,
    plot: Path | None,
    rates: Sequence[float],
    prefix_cache: bool,
    **options: Any,
) -> None:
    unfit = {"--tune": tune, "--plot": plot, "--rate": rates, "--prefix-cache": prefix_cache}
    if given := [name for name, value in unfit.items() if value]:
        raise UserError(f"{given[0]}: not with --against. Leave it out.")
    from trt_eagle3.bench.against import against
    from trt_eagle3.bench.peers.job import PeerOptions

    with bars() as progress:
        result = against(
            bundle,
            PeerOptions(*peer),
            progress=progress,
            heard=lambda row: show(row.line(peer[0]), to=log),
            **options,
        )
    if as_json:
        print_json(result.to_dict())
    else:
        show(*result.tables(), *result.lines())


def _bench_images(bundle: Path, peer: _PeerValues | None, as_json: bool) -> None:
    from trt_eagle3.bench.first_token import first_token
    from trt_eagle3.bench.peers.job import PeerOptions

    with bars() as progress:
        options = PeerOptions(*peer) if peer else None
        result = first_token(bundle, peer=options, progress=progress)
    if as_json:
        print_json(result.to_dict())
    else:
        left_out = (f"left out: {case}: {why}" for case, why in result.left_out.items())
        show(result.table(), *left_out)
