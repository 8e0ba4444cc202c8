"""Tuning: what pays is on, what does not is off, and the table says which."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import build_tiny
from trt_eagle3 import LLM, load
from trt_eagle3.bench import tune as tune_module
from trt_eagle3.bench.tune import TuneReport, choose, tune
from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.plan import widths
from trt_eagle3.decode.tuning import TUNING_FILE, TuningTable
from trt_eagle3.errors import UserError

PROMPT = "What is 12 plus 30?"


@pytest.mark.parametrize(
    ("most", "expected"),
    [(2, [1, 2]), (6, [1, 2, 3, 4, 6]), (16, [1, 2, 3, 4, 6, 8, 12, 16]), (7, [1, 2, 3, 4, 6, 7])],
)
def test_widths_run_from_plain_to_the_configured_tree(most: int, expected: list[int]) -> None:
    assert widths(most) == expected


def test_choice_is_the_fastest_width_and_plain_where_speculation_gains_nothing() -> None:
    lengths = {1: 1.0, 3: 2.0, 6: 2.5}
    assert choose(1, {1: 10.0, 3: 12.0, 6: 20.0}, lengths).num_draft_tokens == 3
    assert choose(4, {1: 10.0, 3: 19.0, 6: 24.9}, lengths).num_draft_tokens == 3
    assert choose(4, {1: 10.0, 3: 19.6, 6: 24.9}, lengths).num_draft_tokens == 1  # 2 % are no gain
    assert choose(8, {1: 10.0, 3: 40.0, 6: 70.0}, lengths).num_draft_tokens == 1
    assert choose(2, {1: 10.0, 3: 12.0, 6: 20.0}, lengths).tokens_per_second[3] == pytest.approx(
        2 * 2.0 / 0.012
    )


def tuned(bundle: Path, monkeypatch: pytest.MonkeyPatch, cycle_ms: dict[int, float]) -> TuningTable:
    """Tune with planted cycle times; acceptance is measured."""
    monkeypatch.setattr(
        tune_module,
        "_cycles",
        lambda _e, _c, _q, sizes, counts, *_: {s: {n: cycle_ms[n] for n in counts} for s in sizes},
    )
    report = tune(bundle, batches=(1, 2), max_tokens=16)
    assert TuningTable.model_validate_json((bundle / TUNING_FILE).read_bytes()) == report.table
    assert report.file == bundle / TUNING_FILE
    assert [p.name for p in bundle.iterdir() if "partial" in p.name] == []
    return report.table


def drafted(engine: LLM) -> tuple[tuple[int, ...], int]:
    """Tokens of an answer, and how many cycles drafted."""
    tokens = engine.generate(PROMPT, max_tokens=24).token_ids
    proposed = engine.metrics().proposed
    engine.close()
    return tokens, sum(proposed)


def test_speculation_that_loses_is_off_and_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = build_tiny(tmp_path)
    expected, cycles = drafted(load(bundle))
    assert cycles > 0
    lost = tuned(bundle, monkeypatch, {1: 1.0, 2: 50.0, 3: 60.0, 4: 70.0, 6: 80.0})
    assert [e.num_draft_tokens for e in lost.entries] == [1, 1]
    assert drafted(load(bundle)) == (expected, 0)
    won = tuned(bundle, monkeypatch, {1: 10.0, 2: 10.0, 3: 90.0, 4: 90.0, 6: 90.0})
    assert [e.num_draft_tokens for e in won.entries] == [2, 2]
    tokens, cycles = drafted(load(bundle))
    assert tokens == expected
    assert cycles > 0


def test_acceptance_by_depth_falls_and_widths_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tuned(build_tiny(tmp_path), monkeypatch, dict.fromkeys((1, 2, 3, 4, 6), 1.0))
    assert table.acceptance[1] == ()
    for count, rates in table.acceptance.items():
        assert len(rates) <= count - 1
        assert list(rates) == sorted(rates, reverse=True)
        assert all(0 <= rate <= 1 for rate in rates)


def test_bundle_without_a_draft_cannot_be_tuned(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="without a draft: there is nothing to tune"):
        tune(build_tiny(tmp_path, draft=None))


def test_damaged_table_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = build_tiny(tmp_path)
    (bundle / TUNING_FILE).write_text("{")
    with pytest.raises(UserError, match=r"a damaged table\. Measure again"):
        load(bundle)
    tuned(bundle, monkeypatch, dict.fromkeys((1, 2, 3, 4, 6), 1.0))
    load(bundle)


def test_bundle_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = build_tiny(tmp_path)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(UserError, match="not writable, and the table goes into it"):
        tune(bundle)
    assert not (bundle / TUNING_FILE).exists()


def test_report_says_from_which_acceptance_length_a_width_pays(tmp_path: Path) -> None:
    entry = choose(4, {1: 10.0, 2: 14.0, 4: 25.0}, {1: 1.0, 2: 1.5, 4: 2.0})
    table = TuningTable(
        measured_at="", machine="", speculation=SpeculationConfig(), acceptance={}, entries=(entry,)
    )
    shown = TuneReport(tmp_path, table).tables()[1]
    assert [list(column.cells) for column in shown.columns] == [["4"], ["1.40"], ["2.50"]]
