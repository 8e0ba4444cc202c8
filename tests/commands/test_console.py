"""Commands fit a terminal of 80 columns without cutting what is read or pasted."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tests.terminal import assert_fits
from tests.tiny import DRAFT, TARGET
from trt_eagle3.cli import cli, main
from trt_eagle3.commands import console
from trt_eagle3.commands.doctor import diagnose
from trt_eagle3.io.terminal_text import TextTable, wrapped

Printed = Callable[..., str]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    """Run a command as into a pipe; returns what it prints."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(console.out, "width", 80)

    def run(*args: object) -> str:
        monkeypatch.setattr(sys, "argv", ["trt-eagle3", *map(str, args)])
        with pytest.raises(SystemExit):
            main()
        return capsys.readouterr().out

    return run


def _words(text: str) -> str:
    return " ".join(text.split())


def _shown(part: TextTable, width: int) -> str:
    recorder = Console(width=width, record=True, file=io.StringIO())
    console.show(part, to=recorder)
    return recorder.export_text()


def test_help_fits_80_columns_and_cuts_no_summary(printed: Printed) -> None:
    usage, listed = printed("--help").split("\n", 1)
    assert usage.endswith(" [OPTIONS] COMMAND [ARGS]...")
    assert_fits(listed, 80)
    for name, command in cli.commands.items():
        own = printed(name, "--help")
        assert_fits(own, 80)
        summary = command.get_short_help_str(limit=1000)
        assert f"{name} {summary}" in _words(listed)
        assert summary in _words(own)


def test_inspect_fits_80_columns_and_cuts_no_key(printed: Printed, tmp_path: Path) -> None:
    folder = tmp_path / "a_folder_whose_path_is_longer_than_one_line_of_a_terminal" / "my target"
    folder.parent.mkdir()
    folder.symlink_to(TARGET)
    found = printed("inspect", folder, DRAFT)
    draft = json.loads(printed("inspect", folder, DRAFT, "--json"))["draft"]
    assert str(folder) in found.replace("\n  ", " ")
    shown = [line for line in found.splitlines() if "a_folder_whose" not in line]
    assert_fits("\n".join(shown), 80)
    table = found[found.index("\nfield ") :].split()
    named = (draft["sources"][field]["detail"] for field in draft["sources"] if field in table)
    keys = [key for detail in named for key in detail.split()]
    assert max(map(len, keys)) > 40
    assert set(keys) <= set(table)


def test_doctor_fits_80_columns_and_cuts_no_command(printed: Printed) -> None:
    assert_fits(printed("doctor"), 80)
    here = diagnose()
    nothing = tuple(dataclasses.replace(finding, value=None) for finding in here.findings)
    there, works = (_shown(t, 80) for t in dataclasses.replace(here, findings=nothing).tables())
    assert_fits(there, 80)
    assert_fits(works, 80)
    assert all(finding.fix in _words(there) for finding in here.findings)
    assert "make plugins TENSORRT_INCLUDE=plugins/tensorrt/interface" in there
    assert "make plugins TENSORRT_INCLUDE=/path/to/TensorRT/include" in there


@pytest.mark.parametrize("width", [30, 60, 200])
def test_text_breaks_at_spaces_and_keeps_commands_whole(width: int) -> None:
    command = "trt-eagle3 validate /tmp/bundle --suite full"
    text = f"The draft was not checked. Check it: {command}; then serve it."
    lines = wrapped(text, width)
    assert _words(" ".join(lines)) == text
    assert any(command in line for line in lines)
    assert_fits("\n".join(line.replace("; then", "") for line in lines), max(width, len(command)))


def test_table_puts_a_last_column_without_room_below_its_row() -> None:
    table = TextTable("what", "found", "to get it")
    table.add_row("a long name of a thing", "a long place", "one two three four five six seven")
    assert _shown(table, 80).splitlines()[1].endswith("place  one two three four five six seven")
    header, row, *below = _shown(table, 45).splitlines()
    assert (header.split(), row.split()[-1]) == (["what", "found"], "place")
    assert _words(" ".join(below)) == "one two three four five six seven"
    assert_fits(_shown(table, 45), 45)


def test_pipe_has_80_columns_unless_the_user_sets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services may start with stdout closed."""
    monkeypatch.delenv("COLUMNS", raising=False)
    assert console._width(None) == console._width(io.StringIO()) == 80
    monkeypatch.setenv("COLUMNS", "132")
    assert console._width(None) == 132
    monkeypatch.setenv("COLUMNS", "wide")
    assert console._width(None) == 80
