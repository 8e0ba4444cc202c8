"""Build a bundle from a checkpoint pair (``build``)."""

from __future__ import annotations

from pathlib import Path

import click

from trt_eagle3.commands.console import (
    json_option,
    log,
    override_option,
    print_json,
    set_option,
    show,
    stages,
)
from trt_eagle3.errors import UserError

__all__ = ["build"]


def _config_file(pair: Path | None, given: Path | None) -> Path:
    """Return the config file: the argument, or that of ``--config``."""
    if pair and given:
        raise UserError(f"{pair} and --config {given}: two configs, expected one. Leave one out.")
    file = pair or given
    if file is None:
        raise UserError("build: no config given. Name one: trt-eagle3 build PAIR.yaml")
    if file.is_dir():
        raise UserError(
            f"{file}: a folder, expected a YAML file that names target and draft. Without one: "
            "trt-eagle3 serve TARGET --draft DRAFT"
        )
    return file


@click.command()
@click.argument("pair", required=False, metavar="PAIR.yaml", type=click.Path(path_type=Path))
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help="Read the build config from this YAML file; the same as the argument.",
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
    pair: Path | None,
    config_file: Path | None,
    output: Path | None,
    weights: str,
    calibration: Path | None,
    settings: tuple[str, ...],
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Build a bundle from a checkpoint pair.

    PAIR.yaml is the build config. A relative path in it counts from the current folder, or else
    from the file's folder.
    """
    from trt_eagle3.commands import report
    from trt_eagle3.config import load_config
    from trt_eagle3.io.assignments import parse_assignments
    from trt_eagle3.pipeline import build as run

    config_file = _config_file(pair, config_file)
    config = load_config(
        config_file,
        overrides=parse_assignments(overrides, "--override"),
        settings=parse_assignments(settings),
    )
    with stages() as (begin, describe):
        result = run(
            config,
            output=output,
            config_file=config_file,
            reference_weights=weights == "reference",
            calibration=calibration,
            progress=begin,
            show=describe,
            announce=lambda text: show(text, to=log),
        )
    if as_json:
        print_json(report.build(result))
    else:
        show(*report.build_lines(result))
