"""Tuning: the table says what steps cost here, and switches nothing off."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.tiny import build_tiny
from trt_eagle3 import LLM, load
from trt_eagle3.bench import tune as tune_module
from trt_eagle3.bench.tune import TuneReport, tune
from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.policy.speculation import SpeculationPolicy
from trt_eagle3.decode.policy.tuning import TUNING_FILE, TuningEntry, TuningTable
from trt_eagle3.engine.bundle.read import read_bundle
from trt_eagle3.errors import UserError

PROMPT = "What is 12 plus 30?"


def tuned(bundle: Path, monkeypatch: pytest.MonkeyPatch, cycle_ms: dict[int, float]) -> TuningTable:
    """Tune with planted step times."""
    monkeypatch.setattr(
        tune_module,
        "_cycles",
        lambda _e, _c, _q, sizes, counts, *_: {s: {n: cycle_ms[n] for n in counts} for s in sizes},
    )
    report = tune(bundle, batches=(1, 2))
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


@pytest.mark.parametrize("adaptive", [True, False])
def test_tuned_bundle_drafts_whatever_its_prompts_accepted_and_answers_alike(
    adaptive: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acceptance is learnt from what is served: prompts of a tuning cannot switch a draft off."""
    bundle = build_tiny(tmp_path, speculation={"adaptive": adaptive})
    expected, cycles = drafted(load(bundle))
    assert cycles > 0
    tuned(bundle, monkeypatch, {1: 10.0, 2: 11.0, 3: 12.0, 4: 13.0, 6: 14.0})
    tokens, cycles = drafted(load(bundle))
    assert tokens == expected
    assert cycles > 0


def test_adaptive_policy_tuned_where_trees_cost_too_much_tries_one_and_drafts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = build_tiny(tmp_path, speculation={"adaptive": True})
    tuned(bundle, monkeypatch, {1: 1.0, 2: 50.0, 3: 60.0, 4: 70.0, 6: 80.0})
    steps = read_bundle(bundle).config.speculation.steps
    assert drafted(load(bundle))[1] == steps, "one chain"


def test_table_of_schema_1_is_read_for_its_costs(tmp_path: Path) -> None:
    bundle = build_tiny(tmp_path, speculation={"adaptive": True})
    config = read_bundle(bundle).config.speculation
    entry = {"batch_size": 1, "num_draft_tokens": 1, "tokens_per_second": {"1": 1.0},
             "cycle_ms": {"1": 10.0, "2": 11.0}}  # fmt: skip
    old = {"schema_version": 1, "measured_at": "", "machine": "", "acceptance": {"2": [0.0]},
           "speculation": config.model_dump(mode="json"), "entries": [entry]}  # fmt: skip
    (bundle / TUNING_FILE).write_text(json.dumps(old))
    with load(bundle) as engine:
        policy = engine.bundle.policy
    assert isinstance(policy, SpeculationPolicy)
    assert policy.cost.seconds(2, 1, 1) == pytest.approx(0.011)


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


def test_report_says_from_which_acceptance_length_a_tree_pays(tmp_path: Path) -> None:
    entry = TuningEntry(batch_size=4, cycle_ms={1: 10.0, 2: 14.0, 4: 25.0})
    table = TuningTable(
        measured_at="", machine="", speculation=SpeculationConfig(), entries=(entry,)
    )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(*TuneReport(tmp_path, table).tables())
    rows = [line.split() for line in console.export_text().splitlines()]
    assert rows[0] == ["sequences", "off,", "ms", "2", "tokens,", "ms", "4", "tokens,", "ms"]
    assert rows[1] == ["4", "10.00", "14.00", "25.00"]
    assert rows[2:] == [
        ["2", "tokens", "4", "tokens"],
        ["sequences", "pay", "from", "pay", "from"],
        ["4", "1.40", "2.50"],
    ]
