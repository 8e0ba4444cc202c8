"""The README's picture: an SVG that loads nothing, in the colours that the page has today."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.tiny import ROOT
from tools.parity_picture import PICTURE, picture
from trt_eagle3.parity.report import plots

SVG = "{http://www.w3.org/2000/svg}"


def style(text: str) -> str:
    [found] = re.findall(r"<style>(:root.*?)</style>", text, re.DOTALL)
    return found


def drawn(monkeypatch: pytest.MonkeyPatch, status: str = "passed", shown: int = 4) -> str:
    """The picture of a report of two stages, ``shown`` plots of which have something to show."""
    for i, name in enumerate(plots.__all__):
        plot = '<svg viewBox="0 0 9 5"></svg>' if i < shown else ""
        monkeypatch.setattr(plots, name, lambda _, plot=plot: plot)
    check = SimpleNamespace
    report: Any = SimpleNamespace(
        passed=status == "passed",
        reference="<PyTorch>",
        bundle=SimpleNamespace(name="a", backend="torch", dtype="float32"),
        checks=[
            check(stage="vision", status="passed"),
            check(stage="draft", status="skipped"),
            check(stage="weights", status="not_applicable"),
            check(stage="target", status=status),
            check(stage="target", status="passed"),
        ],
    )
    return picture(report)


def test_committed_picture_is_whole_and_has_the_page_s_colours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = PICTURE.read_text()
    root = ET.fromstring(text)
    assert len(root.findall(f"{SVG}svg")) == 4
    assert style(text) == style(drawn(monkeypatch)), "run: python tools/parity_picture.py REPORT"
    loaded = re.findall(r"(?:href|src)=\"([^\"]*)|url\(([^)]*)", text)
    assert {(a or b)[0] for a, b in loaded} == {"#"}


@pytest.mark.parametrize("status", ["passed", "failed"])
def test_stages_have_their_worst_status_and_plots_their_place(
    status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = ET.fromstring(drawn(monkeypatch, status, shown=3))
    words = [e.text for e in root.findall(f"{SVG}text")]
    assert words[:4] == [status.upper(), "a: torch, float32, against <PyTorch>", "vision", "target"]
    [of_target] = [e for e in root.findall(f"{SVG}text") if e.text == "target"]
    assert ("bad" in of_target.attrib["style"]) == (status == "failed")
    places = [(e.get("x"), e.get("y")) for e in root.findall(f"{SVG}svg")]
    assert len(set(places)) == 3
    assert (ROOT / "README.md").read_text().count(f"]({PICTURE.relative_to(ROOT)})") == 1
