"""Build a bundle from a checkpoint pair (``build``)."""

from __future__ import annotations

from pathlib import Path

import click

from trt_eagle3.commands.console import (
    json_option,
    log,
    out,
    override_option,
    print_json,
    set_option,
    stages,
)

__all__ = ["build"]


@click.command()
@click.option(
    "--config",
    "config_file",
    required=True,
    type=click.Path(path_type=Path),
    help="Read the build config from this YAML file.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Write the bundle into this folder, instead of the config's.",
)
@click.option(
    "--weights",
    type=click.Choice(["contained", "reference"]),
    default="contained",
    show_default=True,
    help=(
        "Location of the weights. contained: in the bundle, linked or copied; reference: in the "
        "checkpoints."
    ),
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    help="Calibrate engine.weights: int4 with these prompts and images, a JSON list or lines.",
)
@set_option("Set a key of the build config, such as limits.max_batch_size=8; may be repeated.")
@override_option
@json_option
def build(
    config_file: Path,
    output: Path | None,
    weights: str,
    calibration: Path | None,
    settings: tuple[str, ...],
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Build a bundle from a checkpoint pair."""
    from trt_eagle3.commands import report
    from trt_eagle3.config import load_config
    from trt_eagle3.io.assignments import parse_assignments
    from trt_eagle3.pipeline import build as run

    config = load_config(
        config_file,
        overrides=parse_assignments(overrides, "--override"),
        settings=parse_assignments(settings),
    )
    with stages() as (begin, show):
        result = run(
            config,
            output=output,
            config_file=config_file,
            reference_weights=weights == "reference",
            calibration=calibration,
            progress=begin,
            show=show,
            announce=lambda text: log.print(text, soft_wrap=True, markup=False),
        )
    if as_json:
        print_json(report.build(result))
    else:
        out.print(*report.build_lines(result), sep="\n", soft_wrap=True, markup=False)
