"""The record of answers: what it covers, that it repeats, and that a changed answer is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from benchmarks.record_answers import AnswerCase, cases, first_difference, main, run_case

ONE = "moe/torch-float32-ahead/dynamic"
FEW_PAGES = "tiny/onnxruntime-float32/chain"


def case_named(name: str) -> AnswerCase:
    (case,) = (case for case in cases() if case.name == name)
    return case


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["--processes", "1", *map(str, arguments)])


def test_cases_cover_every_engine_tree_batch_size_and_request() -> None:
    names = [case.name.split("/") for case in cases()]
    assert len({tuple(name) for name in names}) == len(names)
    trees = {"chain", "tree", "dynamic"}
    for pair, expected in {
        "tiny": trees | {"no-draft"},
        "moe": trees | {"no-draft"},
        "hybrid": trees | {"no-draft"},
        "hybrid-mtp": trees,
    }.items():
        for engine in ("onnxruntime-float32", "torch-float32", "torch-bfloat16"):
            assert {tree for p, e, tree in names if (p, e) == (pair, engine)} == expected
    batches = [batch for case in cases() for batch in case.batches]
    assert {len(batch) for batch in batches} == set(range(1, 9))
    asked = {name for batch in batches for name in batch}
    wanted = {"text", "image", "images", "video", "json", "penalties", "text sampled"}
    assert asked >= wanted


def test_record_written_twice_is_the_same_and_a_changed_answer_is_named(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert run(first, "--only", ONE).exit_code == 0
    answers = json.loads(first.read_text())
    changed = next(name for name, answer in answers.items() if len(answer["tokens"]) > 3)
    altered = tmp_path / "altered.json"
    other = answers[changed]["tokens"][:]
    other[2] += 1
    altered.write_text(json.dumps({**answers, changed: {**answers[changed], "tokens": other}}))
    done = run(second, "--only", ONE, "--compare", altered)
    assert done.exit_code == 1
    assert f"Error: {changed}: tokens differ from 2 on" in done.output
    assert second.read_text() == first.read_text()


def test_case_with_few_pages_preempts_and_reuses_prefixes() -> None:
    found = run_case(case_named(FEW_PAGES))
    assert len(found.answers) == 8
    assert all(answer["tokens"] for answer in found.answers.values())
    assert max(n for answer in found.answers.values() for n in answer["accepted"]) > 3
    assert found.num_preempted > 0
    assert found.num_reused > 0


ANSWER = {"tokens": [3, 4, 5], "accepted": [2]}


@pytest.mark.parametrize(
    ("now", "named"),
    [
        ({"a": ANSWER}, None),
        ({"a": {**ANSWER, "tokens": [3, 4]}}, "a: tokens differ from 2 on"),
        ({"a": {**ANSWER, "accepted": [2, 1]}}, "a: accepted differ from 1 on"),
        ({"a": ANSWER, "b": ANSWER}, "b: only in the new record"),
        ({}, "a: only in the old record"),
    ],
)
def test_first_difference_names_the_answer_and_the_place(
    now: dict[str, Any], named: str | None
) -> None:
    found = first_difference({"a": ANSWER}, now)
    assert (found or "").startswith(named or "")
    assert (found is None) == (named is None)


def test_no_engine_of_that_name_is_a_usage_error() -> None:
    done = run("--only", "no such engine")
    assert done.exit_code == 2
    assert "no engine's name contains 'no such engine'" in done.output
