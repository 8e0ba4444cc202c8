"""Metrics as Prometheus reads them."""

from __future__ import annotations

import re

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
