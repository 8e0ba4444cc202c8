"""What tests of the server share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """``serve`` sets the level of the package's log; a process of its own ends with it."""
    log = logging.getLogger("trt_eagle3")
    before = log.level
    yield
    log.setLevel(before)
