"""Names of log levels for command options."""

from __future__ import annotations

__all__ = ["LOG_LEVELS"]

LOG_LEVELS = ("debug", "info", "warning", "error")
