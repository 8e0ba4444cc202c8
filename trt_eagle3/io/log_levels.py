"""Names of log levels, for options of commands."""

from __future__ import annotations

__all__ = ["LOG_LEVELS"]

LOG_LEVELS = ("debug", "info", "warning", "error")
