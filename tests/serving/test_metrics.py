"""Metrics as Prometheus reads them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from tests.tiny import ROOT
from trt_eagle3.decode.metrics import EngineMetrics, Histogram, Meter
from trt_eagle3.serving.metrics import exposition

IDLE = dict.fromkeys(
    (
        "running",
        "waiting",
        "preempted",
        "reused_tokens",
        "kv_pages_used",
        "kv_pages_cached",
        "kv_pages_total",
    ),
    0,
)
PARSERS = {
    "text/plain": text_string_to_metric_families,
    "application/openmetrics-text": openmetrics.text_string_to_metric_families,
}
MODEL = 'a "quoted" \\ name\nin two lines'
MOMENT = EngineMetrics(
    requests={"stop": 7, "length": 2, "error": 1},
    prompt_tokens=123_456_789,
    generated_tokens=4_000,
    reused_tokens=1_000_000,
    cycles=1_300,
    accepted=(900, 500, 250),
    proposed=(1_200, 1_200, 800),
    queue_seconds=Histogram((0.005, 0.25, 1.0, 30.0), (3, 2, 1, 0, 4), 187.25),
    first_token_seconds=Histogram((0.1, 2.5), (0, 0, 0), 0.0),
    token_seconds=Histogram((0.001, 0.0025), (10, 20, 3), 1 / 3),
    running=2,
    waiting=5,
    preempted=1,
    kv_pages_used=17,
    kv_pages_cached=3,
    kv_pages_total=128,
    draft_tokens=3,
    draft_tokens_per_cycle=Histogram((0.0, 1.0, 15.0), (9, 8, 7, 6), 300.0),
    step_seconds=0.125,
    prepare_seconds=2.0,
)
# what version 0.1 wrote of that moment
RECORDED = (Path(__file__).parent / "recorded_metrics.txt").read_text()


def parsed(text: str, kind: str = "text/plain") -> dict[str, Any]:
    """Family -> its type, its help, and the value of each sample by name and labels."""
    return {
        family.name: (
            family.type,
            family.documentation,
            {(s.name, frozenset(s.labels.items())): s.value for s in family.samples},
        )
        for family in PARSERS[kind](text)
    }


def values(meter: Meter) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Name and labels of each sample -> its value."""
    families = parsed(exposition(meter.snapshot(**IDLE), "m", "")[0].decode())
    return {key: value for *_, samples in families.values() for key, value in samples.items()}


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", "text/plain"),
        ("text/plain;version=0.0.4;q=0.2,*/*;q=0.1", "text/plain"),
        ("application/openmetrics-text;version=1.0.0;q=0.5,*/*", "application/openmetrics-text"),
        ("application/openmetrics-text;version=soon", "text/plain"),
        ('application/openmetrics-text;version="1.0.0"', "text/plain"),
    ],
)
def test_exposition_says_what_version_0_1_said(accept: str, kind: str) -> None:
    content, content_type = exposition(MOMENT, MODEL, accept)
    assert content_type.partition(";")[0] == kind
    found, recorded = parsed(content.decode(), kind), parsed(RECORDED)
    assert len(recorded) == 22
    assert {name: found[name] for name in recorded} == recorded
    assert set(found) - set(recorded) == {
        "trt_eagle3_speculation_off",
        "trt_eagle3_media_cache_hits",
        "trt_eagle3_media_cache_misses",
        "trt_eagle3_media_cache_bytes",
    }


@pytest.mark.parametrize(
    ("cycles", "expected"),
    [
        ([], {"does_not_pay": 0, "never_drafted": 0}),
        ([3], {"does_not_pay": 0, "never_drafted": 0}),
        ([3, 0], {"does_not_pay": 1, "never_drafted": 0}),
        ([0], {"does_not_pay": 0, "never_drafted": 1}),
    ],
)
def test_speculation_off_names_the_reason(cycles: list[int], expected: dict[str, int]) -> None:
    meter = Meter(0.0)
    for draft_tokens in cycles:
        meter.batch_cycle(draft_tokens)
        if draft_tokens:
            meter.cycle(1, draft_tokens, 2, 0.01)
    found = values(meter)
    name = "trt_eagle3_speculation_off"
    assert {
        reason: found[name, frozenset({"model": "m", "reason": reason}.items())]
        for reason in expected
    } == expected


def test_width_of_cycles_is_a_gauge_a_histogram_and_a_counter_of_plain_ones() -> None:
    meter = Meter(0.0)
    for draft_tokens in (0, 0, 3, 1):
        meter.batch_cycle(draft_tokens)
    found = values(meter)

    def value(name: str, **labels: str) -> float:
        return found[f"trt_eagle3_{name}", frozenset({"model": "m", **labels}.items())]

    assert value("draft_tokens") == 1
    assert value("speculation_on") == 1
    assert value("plain_cycles_total") == 2
    bounds = ("0", "1", "2", "3", "+Inf")
    assert [value("draft_tokens_per_cycle_bucket", le=le) for le in bounds] == [2, 3, 3, 4, 4]
    assert value("draft_tokens_per_cycle_sum") == 4


def known_series() -> dict[str, set[str]]:
    """The names of all series, and the labels of each."""
    meter = Meter(0.0)
    meter.cycle(1, 2, 2, 0.1)
    series: dict[str, set[str]] = {}
    for name, labels in values(meter):
        series.setdefault(name, set()).update(label for label, _ in labels)
    return series


def test_dashboard_asks_for_series_and_labels_that_there_are() -> None:
    series = known_series()
    board = json.loads((ROOT / "docs/grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    for query in queries:
        for name, selector in re.findall(r"(trt_eagle3_\w+)(?:\{(.*?)\})?", query):
            assert name in series, query
            assert set(re.findall(r"(\w+)=", selector)) <= series[name], query
        for label in re.findall(r"by \((\w+)\)", query):
            assert all(label in series[n] for n in re.findall(r"trt_eagle3_\w+", query)), query


def test_dashboard_shows_every_metric() -> None:
    text = (ROOT / "docs/grafana.json").read_text()
    for name in known_series():
        stem = re.sub(r"_(bucket|sum|count)$", "", name)
        assert stem in text, stem


def test_panels_do_not_overlap() -> None:
    board = json.loads((ROOT / "docs/grafana.json").read_text())
    taken = [
        (x, y)
        for panel in board["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24
