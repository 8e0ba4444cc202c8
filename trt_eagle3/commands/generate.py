"""Answer a prompt on the command line (``generate``)."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_eagle3.commands.console import (
    built_bundle,
    cache_option,
    draft_option,
    json_option,
    log,
    print_json,
    set_option,
    show,
    target_argument,
    tensor_parallel_option,
)
from trt_eagle3.errors import clip

if TYPE_CHECKING:
    from trt_eagle3.decode.loaded_bundle import LoadedBundle
    from trt_eagle3.decode.request.request import Generation

__all__ = ["generate"]


def _one_text(_context: click.Context, _argument: click.Parameter, words: tuple[str, ...]) -> str:
    """Return the only one of ``words``. A prompt without quotes arrives as several."""
    if len(words) == 1:
        return words[0]
    got = f"{len(words)} words" if words else "none"
    text = clip(" ".join(words) or "What is 2 plus 3?", 80)
    raise click.UsageError(
        f"PROMPT: expected one text after TARGET, got {got}. Quote the prompt: {shlex.quote(text)}"
    )


@click.command()
@target_argument
@click.argument("prompt", nargs=-1, metavar="PROMPT", callback=_one_text)
@click.option(
    "--image",
    "images",
    multiple=True,
    help="Add this image to the prompt, a file, data URI or URL; may be repeated.",
)
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    help="Fetch URLs from this host; may be repeated.",
)
@click.option(
    "--video",
    "videos",
    multiple=True,
    help="Add this video to the prompt, a folder of frames or a file; may be repeated.",
)
@click.option(
    "--max-tokens", default=256, show_default=True, help="Generate at most this many tokens."
)
@click.option(
    "--temperature", default=0.0, show_default=True, help="Sample at this temperature; 0 is greedy."
)
@click.option(
    "--top-k",
    default=0,
    show_default=True,
    help="Sample from this many most likely tokens; 0 is all.",
)
@click.option(
    "--top-p",
    default=1.0,
    show_default=True,
    help="Sample from the most likely tokens of this total probability.",
)
@click.option(
    "--min-p",
    default=0.0,
    show_default=True,
    help="Sample from tokens with at least this share of the top token's probability.",
)
@click.option(
    "--repetition-penalty",
    default=1.0,
    show_default=True,
    help="Penalise tokens in prompt or answer by this factor.",
)
@click.option(
    "--presence-penalty",
    default=0.0,
    show_default=True,
    help="Subtract this from the logits of tokens in the answer.",
)
@click.option("--seed", type=int, help="Set the random seed: the same seed gives the same answer.")
@click.option("--stop", multiple=True, help="End the answer at this text; may be repeated.")
@click.option(
    "--no-speculation", is_flag=True, help="Decode without the draft; the answer is the same."
)
@click.option("--stats", is_flag=True, help="Print limits, speed and acceptance length.")
@tensor_parallel_option
@draft_option
@set_option("TARGET is a checkpoint: set a key of the build config; may be repeated.")
@cache_option
@json_option
def generate(
    target: str,
    prompt: str,
    draft: str | None,
    settings: tuple[str, ...],
    cache: Path | None,
    as_json: bool,
    hosts: tuple[str, ...],
    stats: bool,
    no_speculation: bool,
    tensor_parallel: int | None,
    **options: Any,
) -> None:
    """Answer PROMPT with TARGET, streaming the text.

    TARGET is a bundle, or a checkpoint (a folder or a Hub id), which is built into a cache folder
    and reused while nothing changes. PROMPT - means standard input.
    """
    from trt_eagle3.commands import report
    from trt_eagle3.decode.llm import load
    from trt_eagle3.decode.sampling.sampling_params import SamplingParams
    from trt_eagle3.io.assignments import parse_assignments
    from trt_eagle3.multimodal import LOCAL_MEDIA

    sampling = SamplingParams(
        **{
            field.name: options.pop(field.name)
            for field in dataclasses.fields(SamplingParams)
            if field.name in options
        }
    )
    if prompt == "-":
        prompt = sys.stdin.read().removesuffix("\n")  # ``echo`` adds it
    if not prompt.strip():
        show("warning: the prompt is empty; the model sees only the chat template", to=log)
    bundle = built_bundle(target, draft, parse_assignments(settings), cache)
    media = dataclasses.replace(LOCAL_MEDIA, allowed_hosts=hosts)
    engine = load(bundle, media=media, tensor_parallel=tensor_parallel)
    if stats:
        show(engine.bundle.capacity, to=log)
    answer = engine.stream(prompt, sampling=sampling, speculation=not no_speculation, **options)
    for chunk in answer:
        if not as_json:
            click.echo(chunk.text, nl=False)
    if as_json:
        print_json(dataclasses.asdict(answer.generation))
        return
    click.echo()
    if stats:
        found = answer.generation
        show(report.generation_line(found), to=log)
        if note := _off_note(found, engine.bundle, asked=not no_speculation):
            show(note, to=log)


def _off_note(found: Generation, bundle: LoadedBundle, *, asked: bool) -> str | None:
    """Return why forwards had no draft, with what undoes it; None if all had one."""
    from trt_eagle3.decode.policy.off import off_reason

    drafted = len(found.accepted_lengths)
    if drafted >= found.num_forwards:
        return None
    if not asked:
        return "drafting was off: --no-speculation. Leave it out to draft"
    config, has_draft = bundle.record.config.speculation, bundle.manifest is not None
    reason = off_reason(bundle.path, config, has_draft=has_draft)
    what = "some forwards had no draft" if drafted else "drafting was off"
    return f"{what}: {reason}" if reason else None
