"""Register the command line: one command per entry of ``COMMANDS``, from ``commands/``."""

from __future__ import annotations

import click

from trt_eagle3.commands.benchmark import bench
from trt_eagle3.commands.build import build
from trt_eagle3.commands.checkpoints import convert_draft, inspect
from trt_eagle3.commands.doctor_command import doctor
from trt_eagle3.commands.generate import generate
from trt_eagle3.commands.install_kernels import install_kernels
from trt_eagle3.commands.prove import probe, validate
from trt_eagle3.commands.serve import deploy, serve
from trt_eagle3.io.run_command import run_command

__all__ = ["cli", "main"]

COMMANDS = (
    *(inspect, build, generate, validate, probe, bench),
    *(convert_draft, deploy, serve, doctor, install_kernels),
)


def main() -> None:
    """Run the command line."""
    run_command(cli)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="trt-eagle3")
def cli() -> None:
    """Compile, validate and serve vision-language models with EAGLE-3 drafts or MTP heads."""


for _command in COMMANDS:
    cli.add_command(_command)
