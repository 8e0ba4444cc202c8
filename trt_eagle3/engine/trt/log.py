"""Log of TensorRT: errors are kept for our messages; most other messages are dropped."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from trt_eagle3.errors import UserError

__all__ = ["Log"]


class Log:
    """The logger of a TensorRT module, and the errors that it received.

    Attributes:
        told: other messages that match the pattern ``keeps`` at their start, in order.
    """

    def __init__(self, trt: Any, keeps: re.Pattern[str] | None = None) -> None:
        self.errors: list[str] = []
        self.told: list[str] = []
        self.logger = _make_logger(trt, self.errors, self.told, keeps)

    def fail(self, what: str, fix: str) -> NoReturn:
        """Raise a ``UserError`` about ``what``, with TensorRT's first reason."""
        raise UserError(f"{what}: TensorRT: {self.take_reason()}. {fix}")

    def take_reason(self) -> str:
        """Return the first error since the last call, on one line."""
        reason = " ".join(self.errors[0].split()) if self.errors else "it gave no reason"
        self.errors.clear()
        return reason[:400]


def _make_logger(
    trt: Any, errors: list[str], told: list[str], keeps: re.Pattern[str] | None
) -> Any:
    kept = {trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR}

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            if severity in kept:
                errors.append(msg)
            elif keeps is not None and keeps.match(msg):
                told.append(msg)

    return Logger()
