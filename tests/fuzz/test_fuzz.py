"""The short form of ``make fuzz``: the whole corpus, and the same some hundred mutations of it
each time.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from zlib import crc32

import pytest

from tests.fuzz.large import LARGE
from tests.fuzz.mutate import mutate
from tests.fuzz.run import check, corpus
from tests.fuzz.targets import TARGETS, case_files

CASES = [f"{target}/{name}" for target in TARGETS for name in case_files(target)]
NUM_MUTATIONS = 60
FEWER = {"template": 15, "yaml": 30, "override": 30, "tokenizer": 30}  # of the slow ones


@pytest.mark.parametrize("case", CASES)
def test_case_of_the_corpus_is_taken_or_refused_in_one_line(case: str, tmp_path: Path) -> None:
    target, _, name = case.partition("/")
    assert not check(target, case_files(target)[name].read_bytes(), tmp_path)


@pytest.mark.parametrize("case", LARGE)
def test_large_case_is_taken_or_refused_in_one_line(case: str, tmp_path: Path) -> None:
    assert not check(case.partition("/")[0], LARGE[case](), tmp_path)


@pytest.mark.parametrize("target", TARGETS)
def test_sound_case_is_taken(target: str, tmp_path: Path) -> None:
    made = corpus(target)[-1:] if target == "bundle" else []
    files = [file for name, file in case_files(target).items() if name.startswith("sound")]
    sound = [file.read_bytes() for file in files] + made
    for number, text in enumerate(sound):
        folder = tmp_path / str(number)
        folder.mkdir()
        TARGETS[target](text, folder)
    assert sound


@pytest.mark.parametrize("target", TARGETS)
def test_mutations_of_the_corpus_are_taken_or_refused_in_one_line(
    target: str, tmp_path: Path
) -> None:
    random, cases = Random(crc32(target.encode())), corpus(target)
    for number in range(FEWER.get(target, NUM_MUTATIONS)):
        folder = tmp_path / str(number)
        folder.mkdir()
        text = mutate(random.choice(cases), random)
        assert not check(target, text, folder), text


def test_check_finds_every_kind_of_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trt_eagle3.errors import UserError

    def refuse(message: str) -> None:
        raise UserError(message)

    def slow(_: bytes, __: Path) -> None:
        sum(range(10**6))

    def endless(_: bytes, __: Path) -> None:
        while True:
            with suppress(Exception):
                re.match("(x+x+)+y", "x" * 30)

    def panics(_: bytes, __: Path) -> None:
        raise type("Panic", (BaseException,), {})

    def waits(_: bytes, __: Path) -> None:
        time.sleep(60)

    monkeypatch.setattr("tests.fuzz.run.MAX_SECONDS", 0.05)
    monkeypatch.setattr("tests.fuzz.run.MAX_WAIT", 0.2)
    faults = {
        "traceback": lambda *_: 1 / 0,
        "long": lambda *_: refuse("x" * 500),
        "endless": endless,
        "panics": panics,
        "waits": waits,
    }
    for name, fault in faults.items():
        monkeypatch.setitem(TARGETS, name, fault)  # type: ignore[arg-type]
        assert check(name, b"", tmp_path), name
    monkeypatch.setattr("tests.fuzz.run.MAX_SECONDS", 1e-4)
    monkeypatch.setitem(TARGETS, "slow", slow)  # type: ignore[arg-type]
    assert check("slow", b"", tmp_path)
    monkeypatch.setattr("tests.fuzz.run.MAX_SECONDS", 8.0)
    monkeypatch.setitem(TARGETS, "sound", lambda *_: refuse("no"))  # type: ignore[arg-type]
    assert not check("sound", b"", tmp_path)
