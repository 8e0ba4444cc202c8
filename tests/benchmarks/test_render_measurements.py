"""docs/measurements.md equals what the result files render; incomplete results are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from benchmarks.render_measurements import FILE, SECTIONS, page, read_results


def result(**changes: Any) -> dict[str, Any]:
    table = {
        "caption": "Milliseconds",
        "better": "low",
        "columns": ["", "1", "8"],
        "rows": [["a", [4.00, 5.0], [6, 6]], ["b", [1300, 1200], None]],
    }
    return {
        "section": "Kernels",
        "position": 1,
        "title": "A kernel",
        "machine": "one H200",
        "date": "2026-11-28",
        "commit": "1234567",
        "commit_is": "measured at",
        "commands": ["python plugins/bench/kernels.py"],
        "versions": "torch 2.11",
        "ours": "bfloat16",
        "theirs": "stock",
        "random": "inputs",
        "tables": [table],
        **changes,
    }


def rendered(tmp_path: Path, record: dict[str, Any]) -> str:
    folder = tmp_path / "h200"
    folder.mkdir()
    (folder / "kernel.json").write_text(json.dumps(record).replace("4.0,", "4.00,"))
    return page(read_results(tmp_path))


def test_page_equals_what_the_results_render() -> None:
    current = FILE.read_text(encoding="utf-8")
    assert current == page(read_results()), "python -m benchmarks.render_measurements"


def test_every_section_has_a_result() -> None:
    assert {r.section for r in read_results()} == set(SECTIONS)


def test_pair_marks_the_better_side_and_counts_losses(tmp_path: Path) -> None:
    text = rendered(tmp_path, result())
    assert "| a | **4.00** / 5.0 | 6 / 6 |" in text
    assert "| b | 1,300 / **1,200** |  |" in text
    assert "ours is better in 1 of 3 cells" in text


def test_higher_is_better_where_the_table_says_so(tmp_path: Path) -> None:
    table = {**result()["tables"][0], "better": "high"}
    assert "| b | **1,300** / 1,200 |  |" in rendered(tmp_path, result(tables=[table]))


def test_unknown_command_is_stated(tmp_path: Path) -> None:
    assert "By a script that was not kept." in rendered(tmp_path, result(commands=[]))


@pytest.mark.parametrize("missing", ["commit", "commands", "versions", "ours", "random", "machine"])
def test_result_without_a_condition_is_refused(tmp_path: Path, missing: str) -> None:
    record = result()
    del record[missing]
    with pytest.raises(ValidationError, match=missing):
        rendered(tmp_path, record)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"section": "Diary"}, "section: expected one of"),
        ({"note": "x"}, "note"),
        ({"tables": [{"caption": "x", "columns": ["", "1"], "rows": [["a"]]}]}, "expected 2 cells"),
        (
            {"tables": [{"caption": "x", "columns": ["", "1"], "rows": [["a", [1, 2]]]}]},
            "a pair needs better",
        ),
    ],
)
def test_result_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        rendered(tmp_path, result(**changes))
