"""Children get this process's variables without its secrets, wherever the package starts one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.tiny import ROOT
from trt_eagle3.io.child_environment import API_KEY_VARIABLE, child_environment

STARTS = {"Popen", "run", "check_call", "check_output", "call"}


def test_child_environment_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (API_KEY_VARIABLE, "ADMIN_KEY", "HF_TOKEN", "OTHER"):
        monkeypatch.setenv(name, "x")
    found = child_environment(MORE="y")
    assert not {API_KEY_VARIABLE, "ADMIN_KEY", "HF_TOKEN"} & found.keys()
    assert (found["OTHER"], found["MORE"]) == ("x", "y")


def started(file: Path) -> list[tuple[str, bool]]:
    """Each start of a process in ``file``, and whether its environment is given."""
    return [
        (f"{file.relative_to(ROOT)}:{node.lineno}", "env" in {k.arg for k in node.keywords})
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in STARTS) == ("subprocess", True)
    ]


def test_every_process_that_is_started_has_a_chosen_environment() -> None:
    files = (ROOT / "trt_eagle3").rglob("*.py")
    found = dict(start for file in files for start in started(file))
    assert len(found) > 5
    assert [place for place, given in found.items() if not given] == []
