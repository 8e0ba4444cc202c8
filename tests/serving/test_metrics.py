"""Metrics as Prometheus reads them."""

from __future__ import annotations

import json
import re

from tests.tiny import ROOT
from trt_eagle3.decode.metrics import Meter
from trt_eagle3.serving.metrics import to_text

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


def test_big_counters_are_exact() -> None:
    meter = Meter(0.0)
    meter.begun(123_456_789)
    text = to_text(meter.snapshot(**IDLE), {"model": "m"})
    [value] = re.findall(r'^trt_eagle3_prompt_tokens_total\{model="m"\} (.*)$', text, re.MULTILINE)
    assert float(value) == 123_456_789


def test_width_of_cycles_is_a_gauge_a_histogram_and_a_counter_of_plain_ones() -> None:
    meter = Meter(0.0)
    for draft_tokens in (0, 0, 3, 1):
        meter.batch_cycle(draft_tokens)
    text = to_text(meter.snapshot(**IDLE), {"model": "m"})
    found = dict(re.findall(r"^(trt_eagle3_\S+) (\S+)$", text, re.MULTILINE))
    assert float(found['trt_eagle3_draft_tokens{model="m"}']) == 1
    assert float(found['trt_eagle3_speculation_on{model="m"}']) == 1
    assert float(found['trt_eagle3_plain_cycles_total{model="m"}']) == 2
    bucket = 'trt_eagle3_draft_tokens_per_cycle_bucket{model="m",le="%s"}'
    assert [float(found[bucket % le]) for le in ("0", "1", "2", "3", "+Inf")] == [2, 3, 3, 4, 4]
    assert float(found['trt_eagle3_draft_tokens_per_cycle_sum{model="m"}']) == 4


def known_series() -> dict[str, set[str]]:
    """The names of all series, and the labels of each beside ``model``."""
    meter = Meter(0.0)
    meter.cycle(1, 2, 2, 0.1)
    text = to_text(meter.snapshot(**IDLE), {"model": "m"})
    series: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(trt_eagle3_\w+)\{(.*)\} ", text, re.MULTILINE):
        series.setdefault(name, set()).update(re.findall(r"(\w+)=", labels))
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
