"""Benchmarks that run as modules answer a user's mistake as ``trt-eagle3`` does."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "no-bundle", "--prompts", "none.json"),
        ("serve",),
        ("cpu", "--nothing"),
        ("gpu", "--nothing"),
        ("preparation", "--nothing"),
        ("tensorrt_vision", "--side", "100"),
    ],
)
def test_mistake_is_told_in_one_line(words: tuple[str, ...]) -> None:
    program = [sys.executable, "-m", f"trt_eagle3.bench.{words[0]}", *words[1:]]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


def test_preparation_prints_every_stage() -> None:
    program = [
        sys.executable,
        "-m",
        "trt_eagle3.bench.preparation",
        "--rounds",
        "1",
        "--max-side",
        "512",
    ]
    told = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    assert all(
        word in told
        for word in ("512 x 512", "decode", "look up bfloat16", "decoder process", "transformers")
    )
