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
