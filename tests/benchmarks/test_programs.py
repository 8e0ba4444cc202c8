"""Benchmarks that run as modules answer a user's mistake as ``trt-eagle3`` does."""

from __future__ import annotations

import importlib
import runpy
import sys

import click
import pytest
import torch
from click.testing import CliRunner

from tests.tiny import ROOT

NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))


def run_program(patch: pytest.MonkeyPatch, name: str, *words: str) -> int | str | None:
    """Run ``python -m benchmarks.NAME WORDS`` here, where torch is loaded.

    Returns its exit status.
    """
    patch.setattr(sys, "argv", [name, *words])
    patch.delitem(sys.modules, f"benchmarks.{name}", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "no-bundle", "--prompts", "none.json"),
        ("serve",),
        ("cpu", "--nothing"),
        ("gpu", "--nothing"),
        ("prefill", "--nothing"),
        ("first_request", "--nothing"),
        ("preparation", "--nothing"),
        ("tensorrt_vision", "--side", "100"),
    ],
)
def test_mistake_is_told_in_one_line(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_program(monkeypatch, *words) == 2
    told = capfd.readouterr().err
    assert told.startswith("error: ")
    assert len(told.splitlines()) == 1


def test_every_program_shows_what_it_takes() -> None:
    mains = {n: getattr(importlib.import_module(f"benchmarks.{n}"), "main", None) for n in NAMES}
    programs = {name: main for name, main in mains.items() if isinstance(main, click.Command)}
    assert len(programs) > 20
    for name, main in programs.items():
        done = CliRunner().invoke(main, ["--help"])
        assert (done.exit_code, bool(main.help)) == (0, True), name


NO_GPU = {
    "gpu": "this benchmark measures a CUDA GPU, and torch sees none. Run it on a machine with one.",
    "calibration": "--device cuda: torch sees no CUDA GPU. Use --device cpu.",
    "synthetic_pair": "--device cuda: torch sees no CUDA GPU. Use --device cpu.",
}


@pytest.mark.parametrize("name", NO_GPU)
def test_without_a_gpu_is_told_in_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ("no-folder", "--processor", ".") if name == "synthetic_pair" else ()
    assert run_program(monkeypatch, name, *words) == 3
    told = capfd.readouterr().err
    assert told == f"error: {NO_GPU[name]}\n"
    assert len(told.splitlines()) == 1


def test_calibration_on_the_cpu_prints_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("--size", "qwen3.5-tiny", "--layers", "4", "--tokens", "64", "--device", "cpu")
    assert run_program(monkeypatch, "calibration", *words) == 0
    told = capfd.readouterr().out
    assert "decoder layer 4 of 4: " in told
    assert "qwen3.5-tiny, 4 layers, 64 tokens, cpu: " in told


def test_preparation_prints_every_stage(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_program(monkeypatch, "preparation", "--rounds", "1", "--max-side", "512") == 0
    told = capfd.readouterr().out
    assert all(
        word in told
        for word in ("512 x 512", "decode", "look up bfloat16", "decoder process", "transformers")
    )
