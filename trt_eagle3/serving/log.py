"""Rate-limit log lines that untrusted clients cause: one per cause and interval."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

__all__ = ["OnePerCause", "set_up_log"]

_MAX_CAUSES = 256  # tracked at a time


@dataclass
class _Seen:
    since: float
    held_back: int = 0


class OnePerCause(logging.Filter):
    """Log filter: pass the first warning or error per cause and interval, and count the rest.

    The next line of the cause gives the count. A cause is a logger, the source line that logs, and
    the type of the exception.
    """

    def __init__(self, interval_s: float = 10.0) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._seen: dict[tuple[object, ...], _Seen] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether ``record`` is written."""
        if record.levelno < logging.WARNING:
            return True
        kind = record.exc_info[0] if record.exc_info else None
        cause = record.name, record.pathname, record.lineno, kind
        with self._lock:
            seen, now = self._seen.get(cause), time.monotonic()
            if seen is not None and now - seen.since < self._interval_s:
                seen.held_back += 1
                return False
            if len(self._seen) >= _MAX_CAUSES:
                self._seen.clear()
            self._seen[cause] = _Seen(now)
        if seen is not None and seen.held_back:
            record.msg = f"{record.getMessage()} (and {seen.held_back} more like it)"
            record.args = None
        return True


def set_up_log(level: str) -> None:
    """Log to stderr, unless logging is already configured. Existing handlers stay unchanged."""
    handler = logging.StreamHandler()
    handler.addFilter(OnePerCause())
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", handlers=[handler])
    logging.getLogger("trt_eagle3").setLevel(level.upper())
