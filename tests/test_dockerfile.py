"""The Dockerfile, as far as it can be proved where there is no Docker: what it copies is there,
its commands are shell, its bases are pinned, and nobody is root in it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests.test_packaging import NEEDED
from tests.tiny import ROOT

TEXT = (ROOT / "Dockerfile").read_text()
IGNORED = (ROOT / ".dockerignore").read_text().split("\n")
WORDS = {
    *("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "RUN", "SHELL", "USER"),
    "WORKDIR",
}


@dataclass(frozen=True)
class Instruction:
    """``word`` in capitals and what follows it, its lines joined."""

    word: str
    value: str

    @property
    def operands(self) -> list[str]:
        """What follows but options."""
        return [x for x in self.value.split() if not x.startswith("--")]


def parse(text: str) -> list[Instruction]:
    lines = [line for line in text.split("\n") if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = [line.split(maxsplit=1) for line in joined.split("\n") if line.strip()]
    return [Instruction(word.upper(), value) for word, value in found]


INSTRUCTIONS = parse(TEXT)


def of(word: str, instructions: Sequence[Instruction] = INSTRUCTIONS) -> list[Instruction]:
    return [i for i in instructions if i.word == word]


def test_every_instruction_is_one() -> None:
    assert {i.word for i in INSTRUCTIONS} <= WORDS


def test_bases_are_pinned_and_the_last_stage_has_no_compiler() -> None:
    defaults = dict(i.value.split("=", 1) for i in of("ARG"))
    bases = [i.operands[0] for i in of("FROM")]
    bases = [re.sub(r"\$\{(\w+)\}", lambda m: defaults[m[1]], base) for base in bases]
    assert len(bases) == 2
    assert all(re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-\w+-ubuntu24\.04", b) for b in bases)
    assert ["-devel-" in base for base in bases] == [True, False]


def test_what_is_copied_is_in_the_repository_and_not_ignored() -> None:
    copied = [i for i in of("COPY") if "--from=" not in i.value]
    sources = {name for i in copied for name in i.operands[:-1]}
    assert [name for name in sources if not (ROOT / name).exists()] == []
    assert {f"!{name}" for name in sources} == {x for x in IGNORED if x.startswith("!")}
    assert {*NEEDED, "trt_eagle3", "plugins"} <= sources


def test_stage_that_is_copied_from_has_what_is_copied() -> None:
    stages = {i.operands[2] for i in of("FROM") if "AS" in i.operands}
    for copied in (i for i in of("COPY") if "--from=" in i.value):
        [stage] = re.findall(r"--from=(\S+)", copied.value)
        assert stage in stages
        assert any(copied.operands[0] in i.value for i in of("RUN"))


def test_commands_are_shell() -> None:
    for run in of("RUN"):
        assert subprocess.run(["bash", "-n", "-c", run.value], check=False).returncode == 0


def test_packages_of_the_system_leave_no_lists() -> None:
    installing = [i.value for i in of("RUN") if "apt-get install" in i.value]
    assert installing
    for value in installing:
        assert "--no-install-recommends" in value
        assert "rm -rf /var/lib/apt/lists/*" in value


def test_program_runs_as_an_ordinary_user() -> None:
    *_, last = of("FROM")
    stage = INSTRUCTIONS[INSTRUCTIONS.index(last) :]
    [user] = of("USER", stage)
    assert int(user.value) > 1000
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [entry] = of("ENTRYPOINT", stage)
    assert json.loads(entry.value)[0] in project["scripts"]
    [install] = [i.value for i in of("RUN", stage) if "pip install" in i.value]
    [extras] = re.findall(r"\[([\w,]+)\]", install)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_constraints_are_the_versions_of_the_locks() -> None:
    [run] = [i.value for i in of("RUN") if "constraints.txt" in i.value and "sed" in i.value]
    command = run.replace("/wheels/constraints.txt", "/dev/stdout")
    found = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, check=True)
    lines = found.stdout.decode().splitlines()
    assert len(lines) > 60
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert any(line.startswith("torch==") for line in lines)


@pytest.mark.skipif(not shutil.which("hadolint"), reason="hadolint is not installed")
def test_linter_finds_nothing() -> None:
    done = subprocess.run(
        ["hadolint", "--no-color", ROOT / "Dockerfile"], capture_output=True, check=False
    )
    assert done.stdout.decode() == ""


def test_parser_joins_lines_and_drops_comments() -> None:
    planted = parse("FROM ubuntu:latest\n# USER 10001\nRUN a \\\n  # within\n  && b\n")
    assert [i.word for i in planted] == ["FROM", "RUN"]
    assert planted[1].value.split() == ["a", "&&", "b"]
    assert of("USER", planted) == []
