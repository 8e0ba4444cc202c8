"""Log the engine's throughput every ten seconds while it has work."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from trt_eagle3.decode.metrics import EngineMetrics

__all__ = ["ThroughputLog", "idle_draft", "throughput_line", "useless_steps"]

_log = logging.getLogger("trt_eagle3")
INTERVAL_S = 10.0
_MIN_CYCLES = 1000  # before a draft step may be called useless
_MIN_RATE = 0.02  # accepted tokens per cycle below which no draft step pays
_IDLE_CYCLES = 10_000  # before a draft may be called idle


class ThroughputLog:
    """Log from a thread of its own; a context manager."""

    def __init__(
        self,
        snapshot: Callable[[], EngineMetrics],
        interval_s: float | None = None,
        off_reason: str | None = None,
    ) -> None:
        """``off_reason``: logged when drafting stops; None: that is not logged."""
        self._off_reason, self._off = off_reason, False
        self._snapshot = snapshot
        self._interval_s = INTERVAL_S if interval_s is None else interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trt-eagle3-log", daemon=True)

    def __enter__(self) -> ThroughputLog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        before, begin, warned = self._snapshot(), time.monotonic(), False
        while not self._stop.wait(self._interval_s):
            now, end = self._snapshot(), time.monotonic()
            line = throughput_line(before, now, end - begin)
            if line is not None:
                _log.info(line)
            if (change := self._speculation_change(before, now)) is not None:
                _log.info(change)
            if not warned and (warning := useless_steps(now) or idle_draft(now)) is not None:
                _log.warning(warning)
                warned = True
            before, begin = now, end

    def _speculation_change(self, before: EngineMetrics, now: EngineMetrics) -> str | None:
        """Return a line if drafting has stopped or begun again since the last line, else None."""
        if self._off_reason is None or now.cycles == before.cycles:
            return None
        off = sum(now.proposed) == sum(before.proposed)
        if off == self._off:
            return None
        self._off = off
        if not off:
            return "speculation: on again"
        cycles = now.cycles - before.cycles
        return f"speculation: off, {cycles} cycles had no draft: {self._off_reason}"


def throughput_line(before: EngineMetrics, now: EngineMetrics, seconds: float) -> str | None:
    """Format the activity of ``seconds`` between two snapshots; None if there was none."""
    prompt = now.prompt_tokens - before.prompt_tokens
    generated = now.generated_tokens - before.generated_tokens
    if not (prompt or generated or now.running or now.waiting):
        return None
    length = _acceptance_length(before, now)
    used = now.kv_pages_used / now.kv_pages_total if now.kv_pages_total else 0.0
    return (
        f"prompt {prompt / seconds:.1f} tokens/s, generated {generated / seconds:.1f} tokens/s, "
        f"running {now.running}, waiting {now.waiting}, KV cache {used:.1%} used, acceptance "
        f"length {'-' if length is None else f'{length:.2f}'}"
    )


def _acceptance_length(before: EngineMetrics, now: EngineMetrics) -> float | None:
    """Return the mean tokens per verified forward between two snapshots; None without a draft."""
    proposed = (now.proposed[:1] or (0,))[0] - (before.proposed[:1] or (0,))[0]
    accepted = sum(now.accepted) - sum(before.accepted)
    return 1 + accepted / proposed if proposed > 0 else None


def useless_steps(metrics: EngineMetrics) -> str | None:
    """Return a warning if the draft's last steps are hardly ever accepted, else None.

    The rate is per cycle, not per cycle that reached the step: an unreached step has no use.
    """
    cycles = metrics.proposed[0] if metrics.proposed else 0
    rates = [accepted / max(cycles, 1) for accepted in metrics.accepted]
    useful = max((i + 1 for i, rate in enumerate(rates) if rate >= _MIN_RATE), default=1)
    if cycles < _MIN_CYCLES or useful >= len(rates):
        return None
    return (
        f"speculation.steps: {len(rates)}, but draft tokens after step {useful} are accepted in "
        f"less than {_MIN_RATE:.0%} of {cycles} cycles. Build with steps: {useful}."
    )


def idle_draft(metrics: EngineMetrics) -> str | None:
    """Return a warning if drafting hardly ever paid, else None.

    None before the first draft, so also for a bundle without one.
    """
    if not metrics.proposed or metrics.cycles < _IDLE_CYCLES:
        return None
    drafted = metrics.proposed[0]
    if drafted >= _MIN_RATE * metrics.cycles:
        return None
    return (
        f"speculation: {drafted} of {metrics.cycles} cycles drafted, because drafting does not pay "
        "with these requests. Measure with trt-eagle3 bench --tune, or build without a draft."
    )
