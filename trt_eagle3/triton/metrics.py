"""The engine's metrics as Triton custom metrics, on the server's own metrics port."""

from __future__ import annotations

from typing import Any

from trt_eagle3.decode.llm import LLM
from trt_eagle3.serving.metrics import families

__all__ = ["PublishedMetrics"]


class PublishedMetrics:
    """Keeps Triton's copy up to date.

    Triton's histograms take single observations, the engine has finished histograms: their
    ``_bucket``, ``_sum`` and ``_count`` series are published as counters, which Prometheus'
    ``histogram_quantile`` reads just as well.
    """

    def __init__(self, engine: LLM, pb_utils: Any, model: str) -> None:
        self._engine = engine
        self._pb_utils = pb_utils
        self._model = model
        self._families: dict[str, Any] = {}
        self._series: dict[tuple[str, tuple[tuple[str, str], ...]], tuple[Any, float]] = {}

    def publish(self) -> None:
        """Send what has changed since the last time."""
        for family in families(self._engine.metrics()):
            for suffix, labels, value in family.samples:
                self._set(
                    family.name + suffix, family.kind == "gauge", family.help, dict(labels), value
                )

    def _set(
        self, name: str, is_gauge: bool, text: str, labels: dict[str, str], value: float
    ) -> None:
        key = name, tuple(labels.items())
        metric, last = self._series.get(key, (None, 0.0))
        if metric is None:
            metric = self._family(name, is_gauge, text).Metric(
                labels={"model": self._model, **labels}
            )
        if is_gauge:
            if value != last:
                metric.set(value)
        elif value > last:
            metric.increment(value - last)
        self._series[key] = metric, value

    def _family(self, name: str, is_gauge: bool, text: str) -> Any:
        if name not in self._families:
            kinds = self._pb_utils.MetricFamily
            self._families[name] = self._pb_utils.MetricFamily(
                name=name, description=text, kind=kinds.GAUGE if is_gauge else kinds.COUNTER
            )
        return self._families[name]
