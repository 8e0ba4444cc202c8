"""Publish the engine's metrics as Triton custom metrics, on the server's metrics port."""

from __future__ import annotations

from typing import Any

from prometheus_client import Metric
from prometheus_client.samples import Sample

from trt_eagle3.decode.llm import LLM
from trt_eagle3.serving.metrics import EngineCollector

__all__ = ["PublishedMetrics"]


class PublishedMetrics:
    """Keeps Triton's copy of the metrics up to date.

    Triton's histograms take single observations, but the engine has complete histograms. Their
    ``_bucket``, ``_sum`` and ``_count`` series are published as counters, which Prometheus'
    ``histogram_quantile`` also reads.
    """

    def __init__(self, engine: LLM, pb_utils: Any, model: str) -> None:
        self._engine = engine
        self._pb_utils = pb_utils
        self._model = model
        self._families: dict[str, Any] = {}
        self._series: dict[tuple[str, tuple[tuple[str, str], ...]], tuple[Any, float]] = {}

    def publish(self) -> None:
        """Send the values that changed since the last call."""
        for family in EngineCollector(self._engine.metrics(), self._model).collect():
            for sample in family.samples:
                self._set(family, sample)

    def _set(self, family: Metric, sample: Sample) -> None:
        key = sample.name, tuple(sample.labels.items())
        metric, last = self._series.get(key, (None, 0.0))
        value = float(sample.value)
        if metric is None:
            metric = self._family(family, sample.name).Metric(labels=sample.labels)
        if family.type == "gauge":
            if value != last:
                metric.set(value)
        elif value > last:
            metric.increment(value - last)
        self._series[key] = metric, value

    def _family(self, family: Metric, name: str) -> Any:
        if name not in self._families:
            kinds = self._pb_utils.MetricFamily
            self._families[name] = self._pb_utils.MetricFamily(
                name=name,
                description=family.documentation,
                kind=kinds.GAUGE if family.type == "gauge" else kinds.COUNTER,
            )
        return self._families[name]
