"""generate: answer a prompt on the command line."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import click

from trt_eagle3.commands.console import (
    bundle_argument,
    json_option,
    log,
    print_json,
)

__all__ = ["generate"]


@click.command()
@bundle_argument
@click.argument("prompt")
@click.option(
    "--image", "images", multiple=True, help="An image file, data URI or URL; may be repeated."
)
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    help="A host that URLs are fetched from; may be repeated.",
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
@click.option("--stats", is_flag=True, help="Print limits, speed and acceptance.")
@json_option
def generate(
    bundle: Path,
    prompt: str,
    as_json: bool,
    hosts: tuple[str, ...],
    stats: bool,
    no_speculation: bool,
    **options: Any,
) -> None:
    """Answer PROMPT with BUNDLE, streaming the text; PROMPT - is read from standard input."""
    from trt_eagle3.commands import report
    from trt_eagle3.decode.llm import load
    from trt_eagle3.decode.sampling_params import SamplingParams
    from trt_eagle3.multimodal import LOCAL_MEDIA

    sampling = SamplingParams(
        **{
            field.name: options.pop(field.name)
            for field in dataclasses.fields(SamplingParams)
            if field.name in options
        }
    )
    if prompt == "-":
        prompt = sys.stdin.read()
    if not prompt.strip():
        log.print("warning: the prompt is empty; the answer is to nothing but the chat template")
    engine = load(bundle, media=dataclasses.replace(LOCAL_MEDIA, allowed_hosts=hosts))
    if stats:
        log.print(engine.bundle.capacity)
    answer = engine.stream(prompt, sampling=sampling, speculation=not no_speculation, **options)
    for chunk in answer:
        if not as_json:
            click.echo(chunk.text, nl=False)
    if as_json:
        print_json(dataclasses.asdict(answer.generation))
        return
    click.echo()
    if stats:
        log.print(report.generation_line(answer.generation))
