"""What tests of serving share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def log_level_put_back() -> Iterator[None]:
    """``serve`` sets the package's; a level that is not set by ``setLevel`` stays in caches."""
    log = logging.getLogger("trt_eagle3")
    before = log.level
    yield
    log.setLevel(before)
