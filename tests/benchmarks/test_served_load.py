"""Where an engine's time goes under load: steps by kind, and the time between them."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import served_load
from benchmarks.served_load import ServedLoad, main, measure, summary
from benchmarks.step_trace import StepTrace, TracedStep, kinds
from benchmarks.traffic import drawn_bodies, request_of
from tests.tiny import build_tiny
from trt_eagle3.bench.workload import Load, Run, TimedReply, open_engine


def test_kinds_that_took_longest_come_first() -> None:
    steps = [
        TracedStep(seconds=0.004, batch=8),
        TracedStep(seconds=0.006, batch=8, before=0.001),
        TracedStep(seconds=0.02, prompt_rows=64, before=0.5, waited=0.497),
    ]
    found = kinds(steps)
    assert [(kind.name, kind.count) for kind in found] == [
        ("nothing to do", 1),
        ("prompts <=256", 1),
        ("plain <=8", 2),
        ("between steps", 2),
    ]
    assert [kind.seconds for kind in found] == pytest.approx([0.497, 0.02, 0.01, 0.004])
    assert found[2].median_ms == pytest.approx(5.0)


def test_request_of_a_body_has_its_text_and_its_image() -> None:
    (with_image,) = drawn_bodies(1, seed=3, images=1.0, max_tokens=9, max_words=20)
    request = request_of(with_image, speculation=False)
    assert request.prompt_text.endswith("What follows?")
    assert bytes(request.images[0])[:2] == b"\xff\xd8", "a JPEG"  # type: ignore[arg-type]
    assert (request.sampling.max_tokens, request.speculation) == (9, False)
    assert request.sampling.ignore_eos
    del with_image["ignore_eos"]
    assert not request_of(with_image, speculation=True).sampling.ignore_eos


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("engines"))


def test_every_step_and_token_of_a_load_is_counted(bundle: Path) -> None:
    bodies = drawn_bodies(4, seed=0, images=0.5, max_tokens=20, max_words=30)
    requests = [request_of(body, speculation=False) for body in bodies]
    with open_engine(bundle) as engine:
        found: ServedLoad = measure(engine, requests, Load(2, pause_s=0.01))
        with StepTrace() as trace:
            pass
    assert found.run.num_tokens == sum(body["max_tokens"] for body in bodies)
    assert len(found.run.first) == 4
    assert not trace.steps
    assert sum(step.images for step in found.steps) == sum(
        len(body["messages"][0]["content"]) - 1 for body in bodies
    )
    # one token of each answer is its prompt's
    assert sum(step.batch for step in found.steps) == found.run.num_tokens - 4
    assert all(step.drafted == 0 for step in found.steps)
    assert 0 < sum(step.seconds + step.before for step in found.steps) <= found.run.seconds
    assert found.host["forward"] > 0
    assert found.lines()[0].startswith("2 clients: ")
    assert found.table().row_count == len(kinds(found.steps))


def _run(num_tokens: int, seconds: float, cycles: int = 0, accepted: tuple[int, ...] = ()) -> Run:
    return Run((TimedReply(tuple(range(num_tokens)), 0.1, ()),), seconds, cycles, accepted)


def test_summary_has_all_rounds_of_both_sides_and_their_ratio() -> None:
    found = {
        (8, False): [_run(100, 1.0), _run(300, 3.0)],
        (8, True): [_run(100, 1.0, 40, (30, 20)), _run(200, 1.0, 10, (10, 5))],
        (32, True): [_run(50, 2.0)],
    }
    table = summary(found)
    cells = list(zip(*(column.cells for column in table.columns), strict=True))
    assert cells == [("8", "100", "150", "1.500", "2.30"), ("32", "", "25", "", "")]


def test_both_sides_of_a_load_are_served_in_turn(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_PAUSE_S", 0.01), ("_FEWEST", 4), ("_PER_CLIENT", 2)):
        monkeypatch.setattr(served_load, name, value)
    words = ["--clients", "2", "--speculation", "both", "--rounds", "2", "--max-tokens", "6"]
    result = CliRunner().invoke(main, [str(bundle), *words, "--max-words", "20", "--images", "0"])
    assert result.exit_code == 0, result.output
    sides = [line for line in result.output.splitlines() if line in ("plain", "speculative")]
    assert sides == ["speculative", "plain", "plain", "speculative"]
    assert "acceptance length" in result.output
