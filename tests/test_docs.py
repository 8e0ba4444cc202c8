"""The documents tell the truth: links lead somewhere, and every command they show is one that
the program has.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import click
import pytest
import yaml

from tests.tiny import ROOT, build_tiny, tiny_config
from tools.config_reference import page
from trt_eagle3.cli import cli
from trt_eagle3.config import config_from_dict

DOCUMENTS = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])
COMMAND = re.compile(r"^(?:\.venv/bin/)?trt-eagle3 (.+?)(?:\s{2,}#.*)?$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#]+)\)")
MODULE = re.compile(r"python -m (trt_eagle3\.[a-z_.]+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    links = [link for link in LINK.findall(document.read_text()) if "://" not in link]
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_commands_are_the_programs_own(document: Path) -> None:
    for line in COMMAND.findall(document.read_text()):
        name, *arguments = shlex.split(line, comments=True)
        command = cli.commands[name]
        context = click.Context(command)
        command.parse_args(context, arguments)  # raises on an unknown option or a missing argument


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_modules_that_are_run_exist(document: Path) -> None:
    for module in MODULE.findall(document.read_text()):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module


def test_a_command_that_does_not_exist_is_caught() -> None:
    found = COMMAND.findall("trt-eagle3 generate bundle --nonsense 3\n")
    name, *arguments = shlex.split(found[0])
    with pytest.raises(click.NoSuchOption):
        cli.commands[name].parse_args(click.Context(cli.commands[name]), arguments)


def test_configuration_page_is_current_and_says_what_every_key_is_for() -> None:
    assert (ROOT / "docs/config.md").read_text() == page(), "python tools/config_reference.py"
    assert not re.findall(r"^\| `\w+` \|.*\|  \|$", page(), re.MULTILINE)


def test_config_of_the_readme_is_valid() -> None:
    blocks = re.findall(r"```yaml\n(.+?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    assert all(config_from_dict(yaml.safe_load(block), "README.md").name for block in blocks)


def test_program_of_the_decoding_page_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = re.search(r"```python\n(.+?)```", (ROOT / "docs/decoding.md").read_text(), re.DOTALL)
    assert program
    exec(program[1].replace("engines/tiny", str(build_tiny(tmp_path))), {})
    assert "3 plus 4" in capsys.readouterr().out


def test_program_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = re.search(r"```python\n(.+?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert program
    monkeypatch.chdir(tmp_path)
    config = tiny_config().model_dump(mode="json", exclude_defaults=True)
    Path("pair.yaml").write_text(yaml.safe_dump(config))
    shutil.copyfile(ROOT / "examples/tiny/images/scene.png", "photo.jpg")
    exec(program[1].replace("engines/qwen3-vl-2b", "engines/tiny"), {})
    printed = capsys.readouterr().out
    assert "2 plus 3" in printed
