"""A client cannot fill the log: one line per cause and interval."""

from __future__ import annotations

import logging

import pytest

from trt_eagle3.serving.log import OnePerCause


class Lines(logging.Handler):
    def __init__(self, interval_s: float) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.addFilter(OnePerCause(interval_s))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def log() -> logging.Logger:
    logger = logging.Logger("test")
    logger.setLevel(logging.INFO)
    return logger


def test_flood_of_one_cause_is_one_line(log: logging.Logger) -> None:
    handler = Lines(60)
    log.addHandler(handler)
    for i in range(10_000):
        log.warning("client %d is odd", i)
    for _ in range(2):
        log.warning("another cause")
    assert handler.lines == ["client 0 is odd", "another cause"]


def test_next_line_counts_those_held_back(log: logging.Logger) -> None:
    handler = Lines(0.0)
    log.addHandler(handler)
    [only] = [f for f in handler.filters if isinstance(f, OnePerCause)]
    for interval in (60.0, 60.0, 60.0, 0.0):
        only._interval_s = interval
        log.error("it failed: %s", interval)
    assert handler.lines == ["it failed: 60.0", "it failed: 0.0 (and 2 more like it)"]


def test_kinds_of_exceptions_are_causes_and_news_is_never_held_back(log: logging.Logger) -> None:
    handler = Lines(60)
    log.addHandler(handler)
    for error in (ValueError("a"), KeyError("b"), ValueError("c")):
        log.error("failed", exc_info=error)
        log.info("served")
    assert handler.lines == ["failed", "served", "failed", "served", "served"]
