"""Where the time of an engine's first image goes: ``python -m benchmarks.first_image [BUNDLE]``.

Three fresh processes open an ``LLM`` that no server has warmed up. The first runs the parts of a
first request one by one, each several times: what the first time takes longer is start-up work. The
second asks about an image at once. The third calls ``LLM.start`` before.

Without BUNDLE, a pair with the vision tower of 8B and few decoder layers is written and built, with
random weights: under a minute on an H200 by the sizes of its files; not measured there yet.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from trt_eagle3.io.run_command import run_command

__all__ = ["main"]

_LAYERS = 8  # of the decoder: the tower is whole
_LIMITS = {"batch": 16, "seq_len": 4096, "kv_tokens": 16384, "steps": 3}
_RUNS = 4  # the third run of a shape captures its graph
_PROMPT = "What is in this picture?"
_T = TypeVar("_T")


@click.command()
@click.argument("bundle", required=False, type=click.Path(path_type=Path, exists=True))
@click.option("--side", default=1024, show_default=True, help="Width and height of the images.")
@click.option(
    "--processor",
    default="examples/tiny/target",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Checkpoint whose tokenizer and processor the pair gets, without BUNDLE.",
)
@click.option("--child", hidden=True)
def main(bundle: Path | None, side: int, processor: Path, child: str | None) -> None:
    """Print milliseconds of the parts of a first request, and of first requests as a whole."""
    if child is not None:
        assert bundle is not None, "a child has a bundle"
        print(json.dumps(_CHILDREN[child](bundle, side)))
        return
    with tempfile.TemporaryDirectory() as folder:
        bundle = bundle or _pair(Path(folder), processor)
        console = Console(width=110)
        for name in _CHILDREN:
            found: Mapping[str, list[float]] = json.loads(_output(bundle, side, name))
            table = Table(name, *(f"{i}., ms" for i in range(1, _RUNS + 1)))
            for part, ms in found.items():
                table.add_row(part, *(f"{value:,.1f}" for value in ms))
            console.print(table)


def _pair(folder: Path, processor: Path) -> Path:
    from benchmarks.synthetic_pair import pair_config, write_pair
    from trt_eagle3.config import config_from_dict
    from trt_eagle3.pipeline import build

    write_pair(folder, "8b", processor, layers=_LAYERS)
    config = {**pair_config(folder, "8b", _LIMITS), "speculation": {"steps": _LIMITS["steps"]}}
    return build(config_from_dict(config, "first_image")).path


def _output(bundle: Path, side: int, child: str) -> str:
    words = [sys.executable, "-m", "benchmarks.first_image", str(bundle)]
    words += ["--side", str(side), "--child", child]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


class _Clock:
    """Milliseconds of named parts; the device's work is waited for."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}

    def __call__(self, name: str, part: Callable[[], _T]) -> _T:
        """Time ``part``, once more under its name."""
        start = time.perf_counter()
        result = part()
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.found.setdefault(name, []).append(1e3 * (time.perf_counter() - start))
        return result


def _import_torch() -> None:
    import torch  # noqa: F401


def _opened(clock: _Clock, bundle: Path) -> Any:
    clock("import torch", _import_torch)

    def package() -> Any:
        from trt_eagle3.decode.llm import LLM

        return LLM

    llm = clock("import the package", package)
    return clock("read and check the bundle", lambda: llm(bundle))


def _image(side: int, number: int) -> bytes:
    """Return a new JPEG."""
    import numpy as np
    from PIL import Image

    small = np.random.default_rng(number).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC).save(out, "JPEG")
    return out.getvalue()


def _parts(bundle: Path, side: int) -> Mapping[str, list[float]]:
    """Run the parts of a first request one by one; those of the engine, on its thread."""
    clock = _Clock()
    llm = _opened(clock, bundle)
    core = clock("open target and draft", llm._started)
    for _ in range(_RUNS):
        clock("encode a text to tokens", partial(llm.prepare, _PROMPT))
    prompts = []
    for i in range(_RUNS):
        name = "prepare an image: decode, resize, cut, tokens"
        inputs = clock(name, partial(llm.prepare, _PROMPT, [_image(side, i)]))
        name = "hash it, page-lock its memory"
        prompts.append(clock(name, partial(llm._preprocessor.prompt, inputs)))
    encoder = llm.bundle.vision_encoder()
    clock("open the vision tower", partial(core._ask, lambda: bool(llm.bundle.vision)))
    for prompt in prompts:
        run = partial(_encode, encoder, prompt)
        clock("vision tower over an image", partial(core._ask, run))
    for i in range(_RUNS):
        clock("first token of a text", partial(llm.generate, f"{i} {_PROMPT}", max_tokens=1))
    for i in range(_RUNS):
        _ask(clock, llm, side, 100 + i)
    clock("measure step costs", partial(core._ask, partial(_measure, core)))
    for i in range(_RUNS):
        answer = partial(llm.generate, f"{i} Tell me more.", max_tokens=8, ignore_eos=True)
        clock("8 tokens of a text", answer)
    llm.close()
    return clock.found


def _encode(encoder: Any, prompt: Any) -> int:
    encoder.encode(prompt)
    return 1


def _measure(core: Any) -> int:
    core._measure_costs()
    return 1


def _ask(clock: _Clock, llm: Any, side: int, number: int) -> None:
    images = [_image(side, number)]
    clock("first token of an image", partial(llm.generate, _PROMPT, images=images, max_tokens=1))


def _at_once(bundle: Path, side: int) -> Mapping[str, list[float]]:
    """Ask about an image as soon as target and draft are open."""
    return _asked(bundle, side, "open target and draft", lambda llm: llm._started())


def _after_start(bundle: Path, side: int) -> Mapping[str, list[float]]:
    """Ask about an image after ``LLM.start``."""
    return _asked(bundle, side, "LLM.start", lambda llm: llm.start())


def _asked(
    bundle: Path, side: int, name: str, start: Callable[[Any], object]
) -> Mapping[str, list[float]]:
    """Ask about images after ``start``, which is timed as ``name``."""
    clock = _Clock()
    llm = _opened(clock, bundle)
    clock(name, partial(start, llm))
    for i in range(_RUNS):
        _ask(clock, llm, side, i)
    llm.close()
    return clock.found


_CHILDREN: Mapping[str, Callable[[Path, int], Mapping[str, list[float]]]] = {
    "the parts of a first request": _parts,
    "an image at once": _at_once,
    "an image after LLM.start": _after_start,
}

if __name__ == "__main__":
    run_command(main)
