"""An engine's metrics under Prometheus names, for whatever publishes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from trt_eagle3.decode.metrics import EngineMetrics, Histogram

__all__ = ["Family", "families", "to_text"]

_PREFIX = "trt_eagle3_"


@dataclass(frozen=True)
class Family:
    """One metric.

    Attributes:
        samples: (suffix of the name, labels, value). A histogram has ``_bucket``, ``_sum`` and
            ``_count``.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: tuple[tuple[str, Mapping[str, str], float], ...]


def families(metrics: EngineMetrics) -> Iterator[Family]:
    """Everything that a dashboard or an autoscaler asks for."""
    m = metrics
    yield _counter("prompt_tokens_total", "Tokens of prompts.", m.prompt_tokens)
    yield _counter(
        "reused_tokens_total", "Tokens of prompts that were in the prefix cache.", m.reused_tokens
    )
    yield _counter("generated_tokens_total", "Tokens generated.", m.generated_tokens)
    yield _counter("preemptions_total", "Requests put off because KV pages ran out.", m.preempted)
    yield _counter(
        "cycles_total", "Target forwards behind the prompts', counted per request.", m.cycles
    )
    outcomes = ("stop", "length", "cancelled", "rejected", "error")
    yield _labelled(
        "requests_total",
        "Requests that ended, by outcome.",
        "outcome",
        {**dict.fromkeys(outcomes, 0), **m.requests},
    )
    yield _labelled(
        "proposed_tokens_total",
        "Draft tokens verified on the best path, by position.",
        "position",
        m.proposed,
    )
    yield _labelled(
        "accepted_tokens_total", "Draft tokens accepted, by position.", "position", m.accepted
    )
    yield _gauge(
        "acceptance_length",
        "Mean tokens emitted per target forward that verified drafts, the bonus token included; "
        "0 before the first.",
        m.acceptance_length or 0,
    )
    yield _gauge(
        "speculation_on", "1 while cycles draft, 0 while they decode plainly.", m.speculation_on
    )
    yield _gauge(
        "draft_tokens",
        "Tokens that each request of the last cycle drafted; 0 where it decoded plainly.",
        m.draft_tokens,
    )
    yield _counter(
        "plain_cycles_total", "Cycles of batches that drafted for no request.", m.plain_cycles
    )
    yield _histogram(
        "draft_tokens_per_cycle",
        "Tokens that each request drafted, by cycle of a batch.",
        m.draft_tokens_per_cycle,
    )
    yield _gauge(
        "step_seconds",
        "That the step under way has taken so far; 0 while there is no work.",
        m.step_seconds,
    )
    yield _gauge("requests_running", "Requests being decoded.", m.running)
    yield _gauge("requests_waiting", "Requests in the queue.", m.waiting)
    yield _gauge("kv_pages_used", "Pages of the KV cache that requests hold.", m.kv_pages_used)
    yield _gauge(
        "kv_pages_cached",
        "Pages that only the prefix cache holds; they are given up when needed.",
        m.kv_pages_cached,
    )
    yield _gauge("kv_pages_total", "Pages of the KV cache.", m.kv_pages_total)
    yield _histogram("queue_seconds", "From submission to the first pass.", m.queue_seconds)
    yield _histogram(
        "time_to_first_token_seconds", "From submission to the first token.", m.first_token_seconds
    )
    yield _histogram(
        "inter_token_seconds", "Between tokens: a pass's time over its tokens.", m.token_seconds
    )


def to_text(metrics: EngineMetrics, labels: Mapping[str, str]) -> str:
    """Prometheus' text format, version 0.0.4."""
    lines = []
    for family in families(metrics):
        lines += [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
        for suffix, own, value in family.samples:
            pairs = ",".join(
                f'{name}="{_escape(text)}"' for name, text in {**labels, **own}.items()
            )
            lines.append(f"{family.name}{suffix}{{{pairs}}} {float(value)!r}")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _counter(name: str, text: str, value: float) -> Family:
    return Family(_PREFIX + name, "counter", text, (("", {}, float(value)),))


def _gauge(name: str, text: str, value: float) -> Family:
    return Family(_PREFIX + name, "gauge", text, (("", {}, float(value)),))


def _labelled(
    name: str, text: str, label: str, values: Mapping[str, int] | tuple[int, ...]
) -> Family:
    named = (
        values
        if isinstance(values, Mapping)
        else {str(i + 1): value for i, value in enumerate(values)}
    )
    return Family(
        _PREFIX + name,
        "counter",
        text,
        tuple(("", {label: key}, float(v)) for key, v in named.items()),
    )


def _histogram(name: str, text: str, histogram: Histogram) -> Family:
    bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
    samples: list[tuple[str, Mapping[str, str], float]] = [
        ("_bucket", {"le": bound}, float(count))
        for bound, count in zip(bounds, accumulate(histogram.counts), strict=True)
    ]
    samples += [("_sum", {}, histogram.total), ("_count", {}, float(histogram.count))]
    return Family(_PREFIX + name, "histogram", text, tuple(samples))
