"""How long something has been going on, as other threads read it."""

from __future__ import annotations

from trt_eagle3.decode.request.stopwatch import Stopwatch


def test_stopwatch_reads_seconds_since_the_last_start_and_zero_while_it_is_stopped() -> None:
    now = 100.0
    watch = Stopwatch(lambda: now)
    assert (watch.runs, watch.seconds) == (False, 0.0)
    watch.start()
    now = 107.0
    assert (watch.runs, watch.seconds) == (True, 7.0)
    watch.start()
    now = 109.0
    assert watch.seconds == 2.0
    watch.stop()
    assert (watch.runs, watch.seconds) == (False, 0.0)
