"""bench: every load both ways, the figures add up, and a ratio only between equal answers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.tiny import build_tiny
from trt_eagle3.bench.result import BenchReport, BenchRow, Percentiles, Side
from trt_eagle3.bench.run import bench, request_counts
from trt_eagle3.bench.workload import (
    Load,
    Run,
    TimedReply,
    drive,
    make_requests,
    open_engine,
    pauses,
)
from trt_eagle3.decode.step.decoder import Decoder
from trt_eagle3.errors import CheckFailedError, UserError
from trt_eagle3.prompts.prompt_file import Question

QUESTIONS = [Question(f"What is {i} plus 30?") for i in range(3)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that drafts in every cycle, so that two runs have the same cycles."""
    return build_tiny(tmp_path_factory.mktemp("engines"), speculation={"adaptive": False})


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.json"
    file.write_text(json.dumps([{"prompt": q.prompt} for q in QUESTIONS]))
    return file


@pytest.fixture(scope="module")
def report(bundle: Path, prompts: Path) -> BenchReport:
    return bench(bundle, prompts=prompts, batches=(1, 3), requests=(3, 6), rounds=2, max_tokens=12)


def test_report_has_every_load_both_ways(report: BenchReport) -> None:
    found = report.to_dict()
    assert json.loads(json.dumps(found)) == found
    assert [row["concurrency"] for row in found["rows"]] == [1, 3]
    for row in found["rows"]:
        plain, speculative = row["plain"], row["speculative"]
        assert len(plain["tokens_per_second_by_round"]) == 2
        assert row["num_differing"] == 0
        assert row["ratio"] > 0
        assert len(row["ratio_by_round"]) == 2
        assert row["difference"] in {"faster", "slower", "none"}
        assert (plain["acceptance_length"], plain["acceptance_by_position"]) == (None, [])
        assert 1 < speculative["acceptance_length"] <= 6
        assert speculative["acceptance_length"] == pytest.approx(
            1 + sum(speculative["acceptance_by_position"])
        )
        assert (
            plain["first_token_ms"]["p50"]
            <= plain["first_token_ms"]["p95"]
            <= plain["first_token_ms"]["p99"]
        )


def test_report_prints_and_plots(report: BenchReport, tmp_path: Path) -> None:
    shown = io.StringIO()
    Console(width=60, file=shown).print(*report.tables())
    lines = [line.split() for line in shown.getvalue().splitlines()]
    assert "…" not in shown.getvalue()
    assert sum(line[:2] == ["1", "speculative"] for line in lines) == 2  # speed, and latency
    start = lines.index(next(line for line in lines if line[0] == "position")) + 1
    rates = report.rows[0].speculative.acceptance_by_position
    assert [int(line[1]) for line in lines[start:]] == [round(100 * r) for r in rates]
    assert "medians of 2 rounds" in report.lines()[0]
    for name in ("plot.png", "plot.svg"):
        report.plot(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000
    with pytest.raises(UserError, match=r"expected a name that ends in \.png"):
        report.plot(tmp_path / "plot.txt")


def row_of(ratios: list[float], *, drafted: bool = True) -> BenchRow:
    """A load whose plain rounds take a second; the speculative ones differ by ``ratios``."""
    replies = (TimedReply((1, 2), 0.1, ((1.0, 1),)),)
    plain = Side(tuple(Run(replies, 1.0, 0, ()) for _ in ratios))
    cycles, accepted = (1, (1,)) if drafted else (0, ())
    return BenchRow(
        Load(1), plain, Side(tuple(Run(replies, 1 / r, cycles, accepted) for r in ratios)), 0
    )


@pytest.mark.parametrize(
    ("ratios", "difference", "line"),
    [
        ([1.4, 1.5, 1.6], "faster", "speculative is faster, x 1.50 (the spread of 3 rounds: 1.40"),
        ([0.7, 0.8], "slower", "speculative is slower, x 0.75 (the spread of 2 rounds: 0.70 to 0."),
        ([0.9, 1.3, 1.2], "none", "no difference: 1.00 is within the spread of 3 rounds: 0.90 to"),
        ([1.3], "faster", "speculative is faster, x 1.30 (one round: the spread is not known)"),
    ],
)
def test_comparison_names_the_spread_and_calls_a_difference_within_it_none(
    ratios: list[float], difference: str, line: str
) -> None:
    row = row_of(ratios)
    assert row.difference == difference
    assert f"1 in flight: {line}" in str(row.comparison)


def test_nothing_drafted_has_no_ratio() -> None:
    row = row_of([1.3, 1.4], drafted=False)
    assert (row.ratio, row.difference) == (None, None)
    assert "nothing was drafted, so there is nothing to compare" in str(row.comparison)


def test_percentiles_of_tokens_share_the_time_of_their_pass() -> None:
    reply = TimedReply((1, 2, 3, 4), 0.5, ((0.3, 3),))
    side = Side((Run((reply,), 1.0, 1, (1, 1)),))
    assert side.per_token == Percentiles(*[pytest.approx(100.0)] * 3)
    assert side.first_token == Percentiles(*[pytest.approx(500.0)] * 3)
    assert side.tokens_per_second == 4
    assert side.acceptance_by_position == (1.0, 1.0)
    assert side.acceptance_length == 3.0


def test_percentiles_have_three_digits_and_whole_milliseconds_from_a_second_on() -> None:
    assert str(Percentiles(7.128, 999.4, 1074.6)) == "7.13 / 999 / 1075"


def test_poisson_arrivals_are_those_of_the_seed_and_every_request_is_answered(bundle: Path) -> None:
    engine = open_engine(bundle)
    requests = make_requests(QUESTIONS, 6, max_tokens=8)
    closed = drive(engine, requests, Load(2))
    random = drive(engine, requests, Load(rate=200.0), seed=3)
    engine.close()
    assert [r.token_ids for r in random.replies] == [r.token_ids for r in closed.replies]
    assert random.cycles == closed.cycles > 0


def test_arrivals_that_the_engine_cannot_queue_are_one_line(tmp_path: Path) -> None:
    engine = open_engine(build_tiny(tmp_path, limits={"max_waiting": 1, "max_batch_size": 1}))
    with pytest.raises(
        UserError, match=r"--rate 10000: requests come faster than they are answered\. Lower it"
    ):
        drive(engine, make_requests(QUESTIONS, 12, max_tokens=400), Load(rate=10_000.0))
    engine.close()


def test_answers_that_differ_give_no_ratio(
    bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Decoder.step

    def wrong(self: Decoder, sequences: Any, tree: Any) -> Any:
        found = step(self, sequences, tree)
        for s in sequences:
            if s.drafting and len(s.tokens) > 3:
                s.tokens[-1] = 5
        return found

    monkeypatch.setattr(Decoder, "step", wrong)
    with pytest.raises(
        CheckFailedError, match=r"speculative and plain tokens differ for . of 3 prompts"
    ):
        bench(
            bundle,
            prompts=prompts,
            batches=(1,),
            requests=(3,),
            rounds=1,
            max_tokens=24,
            ignore_eos=True,
        )


def test_loads_that_the_bundle_cannot_take_are_refused(bundle: Path) -> None:
    with pytest.raises(UserError, match="--batch 9: this bundle decodes 8 at once"):
        bench(bundle, batches=(1, 9))
    with pytest.raises(UserError, match="exclude each other"):
        bench(bundle, batches=(1,), rates=(2.0,))


def test_bundle_without_a_draft_is_measured_plainly(tmp_path: Path, prompts: Path) -> None:
    found = bench(
        build_tiny(tmp_path, draft=None), prompts=prompts, batches=(1,), rounds=1, max_tokens=4
    ).to_dict()
    assert found["rows"][0]["ratio"] is None
    assert "speculative" not in found["rows"][0]


def test_requests_are_for_all_loads_or_for_each() -> None:
    loads = [Load(1), Load(8)]
    assert request_counts(loads, (), 3) == {Load(1): 6, Load(8): 33}
    assert request_counts(loads, (5,), 3) == {Load(1): 5, Load(8): 5}
    assert request_counts(loads, (2, 8), 3) == {Load(1): 2, Load(8): 8}
    with pytest.raises(UserError, match="one for each of 2 loads, got 3"):
        request_counts(loads, (1, 2, 3), 3)


def test_pauses_are_exponential_with_the_mean_asked_for() -> None:
    waits = pauses(0, 0.2)
    values = [next(waits) for _ in range(4000)]
    assert sum(values) / len(values) == pytest.approx(0.2, rel=0.05)
    assert sum(v < 0.2 for v in values) / len(values) == pytest.approx(1 - 1 / 2.71828, abs=0.02)
