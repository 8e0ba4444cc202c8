"""Compile the CUDA kernels on this machine (``install-kernels``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trt_eagle3.commands.console import json_option, print_json, show, stages

__all__ = ["install_kernels"]


@click.command("install-kernels")
@click.option(
    "--architecture",
    "architectures",
    multiple=True,
    metavar="NUMBER",
    help="Compile for this GPU architecture, such as 90; may be repeated.  [default: those of "
    "this machine's GPUs]",
)
@click.option(
    "--tensorrt-include",
    type=click.Path(path_type=Path),
    help="Compile the TensorRT plugins too, with the headers in this folder.",
)
@click.option(
    "--output",
    "folder",
    type=click.Path(path_type=Path),
    help="Write the libraries to this folder, instead of the default library folder.",
)
@json_option
def install_kernels(architectures: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Compile the CUDA kernels for this machine's GPUs.

    It takes minutes.
    """
    from trt_eagle3.engine.kernels.install import install_kernels as run

    with stages() as (begin, _):
        result = run(architectures, progress=begin, **options)
    if as_json:
        print_json(result.to_dict())
    else:
        show(*(f"wrote {path}" for path in result.libraries))
