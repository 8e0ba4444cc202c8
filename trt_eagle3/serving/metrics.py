"""Export an engine's metrics under Prometheus names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder

from trt_eagle3.decode.metrics import OFF_REASONS, EngineMetrics, Histogram

__all__ = ["EngineCollector", "exposition"]

_PREFIX = "trt_eagle3_"
_OUTCOMES = ("stop", "length", "cancelled", "rejected", "error")


def exposition(metrics: EngineMetrics, model: str, accept: str) -> tuple[bytes, str]:
    """Encode the metrics as the client's ``Accept`` header requests; return bytes and content type.

    The format is OpenMetrics or Prometheus text.
    """
    try:
        encode, content_type = choose_encoder(accept)
    except TypeError:  # a malformed version in the header
        encode, content_type = choose_encoder("")
    return encode(EngineCollector(metrics, model)), content_type


@dataclass(frozen=True)
class EngineCollector:
    """One snapshot of an engine as metric families of ``prometheus_client``, without a registry.

    Attributes:
        model: label of every series.
    """

    metrics: EngineMetrics
    model: str

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        m, counter, gauge, histogram = self.metrics, self._counter, self._gauge, self._histogram
        yield counter("prompt_tokens_total", "Tokens of prompts.", m.prompt_tokens)
        yield counter(
            "reused_tokens_total",
            "Tokens of prompts that were in the prefix cache.",
            m.reused_tokens,
        )
        yield counter("generated_tokens_total", "Tokens generated.", m.generated_tokens)
        yield counter(
            "preemptions_total", "Requests preempted because KV pages ran out.", m.preempted
        )
        yield counter(
            "cycles_total", "Target forwards after prefill, counted per request.", m.cycles
        )
        yield self._labelled(
            "requests_total",
            "Requests that ended, by outcome.",
            "outcome",
            {**dict.fromkeys(_OUTCOMES, 0), **m.requests},
        )
        yield self._by_position(
            "proposed_tokens_total",
            "Draft tokens verified on the best path, by position.",
            m.proposed,
        )
        yield self._by_position(
            "accepted_tokens_total", "Draft tokens accepted, by position.", m.accepted
        )
        yield gauge(
            "acceptance_length",
            "Mean tokens emitted per target forward that verified drafts, the bonus token "
            "included; 0 before the first.",
            m.acceptance_length or 0,
        )
        yield gauge(
            "speculation_on",
            "1 while cycles draft, 0 while they decode without speculation.",
            m.speculation_on,
        )
        off = GaugeMetricFamily(
            f"{_PREFIX}speculation_off",
            "1 while cycles decode without speculation, by reason. To draft always: trt-eagle3 "
            "build PAIR.yaml --set speculation.adaptive=false",
            labels=["model", "reason"],
        )
        for reason in OFF_REASONS:
            off.add_metric([self.model, reason], m.off_reason == reason)
        yield off
        yield gauge(
            "draft_tokens",
            "Tokens drafted per request in the last cycle; 0 without speculation.",
            m.draft_tokens,
        )
        yield counter("plain_cycles_total", "Batch cycles without any draft.", m.plain_cycles)
        yield histogram(
            "draft_tokens_per_cycle",
            "Tokens drafted per request, by batch cycle.",
            m.draft_tokens_per_cycle,
        )
        yield gauge(
            "step_seconds",
            "Time of the current step so far; 0 while there is no work.",
            m.step_seconds,
        )
        yield gauge("requests_running", "Requests being decoded.", m.running)
        yield gauge("requests_waiting", "Requests in the queue.", m.waiting)
        yield gauge("kv_pages_used", "Pages of the KV cache that requests hold.", m.kv_pages_used)
        yield gauge(
            "kv_pages_cached",
            "Pages that only the prefix cache holds; they are released when needed.",
            m.kv_pages_cached,
        )
        yield gauge("kv_pages_total", "Pages of the KV cache.", m.kv_pages_total)
        yield self._labelled(
            "media_cache_hits_total",
            "Images and videos found in a cache: embeddings on the device or in host memory, or "
            "decoded images.",
            "cache",
            {
                "embeddings": m.embedding_hits,
                "embeddings_host": m.embedding_host_hits,
                "images": m.image_hits,
            },
        )
        yield self._labelled(
            "media_cache_misses_total",
            "Images and videos that the vision tower encoded, and images that were decoded.",
            "cache",
            {"embeddings": m.embedding_misses, "images": m.image_misses},
        )
        kept = GaugeMetricFamily(
            f"{_PREFIX}media_cache_bytes", "Bytes in a cache.", labels=["model", "cache"]
        )
        for cache, num_bytes in (
            ("embeddings", m.embedding_bytes),
            ("embeddings_host", m.embedding_host_bytes),
            ("images", m.image_bytes),
        ):
            kept.add_metric([self.model, cache], num_bytes)
        yield kept
        yield histogram("queue_seconds", "From submission to the first forward.", m.queue_seconds)
        yield histogram(
            "time_to_first_token_seconds",
            "From submission to the first token.",
            m.first_token_seconds,
        )
        yield histogram(
            "inter_token_seconds", "Between tokens: step time per token.", m.token_seconds
        )

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(_PREFIX + name, text, labels=["model"])
        family.add_metric([self.model], value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(_PREFIX + name, text, labels=["model"])
        family.add_metric([self.model], value)
        return family

    def _labelled(self, name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(_PREFIX + name, text, labels=["model", label])
        for key, value in values.items():
            family.add_metric([self.model, key], value)
        return family

    def _by_position(self, name: str, text: str, values: tuple[int, ...]) -> Metric:
        numbered = {str(i): value for i, value in enumerate(values, 1)}
        return self._labelled(name, text, "position", numbered)

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        family = HistogramMetricFamily(_PREFIX + name, text, labels=["model"])
        family.add_metric([self.model], buckets, histogram.total)
        return family
