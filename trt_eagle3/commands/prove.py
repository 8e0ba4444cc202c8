"""Validate what a bundle computes, and probe how to interpret a draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trt_eagle3.commands.console import (
    bars,
    json_option,
    override_option,
    print_json,
    prompts_option,
    show,
    tensor_parallel_option,
)
from trt_eagle3.parity import SUITES
from trt_eagle3.probe import MAX_TOKENS

__all__ = ["probe", "validate"]


@click.command()
@click.argument(
    "bundles", nargs=-1, required=True, metavar="BUNDLE [BUNDLE]", type=click.Path(path_type=Path)
)
@click.option(
    "--suite",
    type=click.Choice(SUITES),
    default="quick",
    show_default=True,
    help="Use the short or the full set of built-in prompts.",
)
@prompts_option
@click.option(
    "--compare",
    is_flag=True,
    help="Compare bundle B with bundle A (arguments A B) instead of PyTorch.",
)
@click.option(
    "--target-only",
    is_flag=True,
    help="With --compare, skip the drafts, for example if only one bundle has one.",
)
@click.option(
    "--target",
    help="The target's checkpoint, if the one of the build has moved.",
)
@click.option("--draft", help="The draft's checkpoint, if the one of the build has moved.")
@click.option(
    "--original",
    help="Measure the cost of quantisation against this 16-bit checkpoint of the target.",
)
@click.option(
    "--thresholds", type=click.Path(path_type=Path), help="Read tolerances from this YAML file."
)
@click.option(
    "--float64", is_flag=True, help="Compute the reference in float64; for small models only."
)
@tensor_parallel_option
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Write the report into this folder, instead of BUNDLE/parity.",
)
@click.option(
    "--junit", type=click.Path(path_type=Path), help="Write the checks to this JUnit XML file too."
)
@json_option
def validate(
    bundles: tuple[Path, ...],
    output: Path | None,
    junit: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Check that BUNDLE computes what PyTorch computes.

    The exit status is 1 if a check fails.
    """
    from trt_eagle3.parity.report.files import check_writable, write_junit, write_report
    from trt_eagle3.parity.run import run_validation

    check_writable((output or bundles[-1] / "parity") / "report.json", *([junit] if junit else []))
    with bars() as progress:
        result = run_validation(bundles, progress=progress, **options)
    files = write_report(result, output) + ((write_junit(result, junit),) if junit else ())
    if as_json:
        click.echo(result.to_json())
    else:
        show(result.table(), *result.lines(files))
    result.check()


@click.command()
@click.argument("path")
@click.argument("draft", required=False)
@prompts_option
@click.option(
    "--max-tokens",
    default=MAX_TOKENS,
    show_default=True,
    help="Generate at most this many tokens per answer.",
)
@override_option
@json_option
def probe(
    path: str, draft: str | None, overrides: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Measure which interpretation of a draft fits its target.

    PATH is a bundle, or a target followed by its DRAFT. Exit status: 0 the draft is read correctly;
    1 another interpretation is better, and the output has its overrides; 4 nothing fits, and the
    last line says which: the draft is right by chance only (it is another target's), or these
    prompts do not fit.
    """
    from trt_eagle3.io.assignments import parse_assignments
    from trt_eagle3.probe.run import probe as run

    with bars() as progress:
        result = run(
            path,
            draft,
            overrides=parse_assignments(overrides, "--override"),
            progress=progress,
            **options,
        )
    if as_json:
        print_json(result.to_dict())
        result.check()
    else:
        show(result.title, result.table(), *result.conclusion_lines())
        click.get_current_context().exit(result.exit_code)  # stdout's last line names the case
