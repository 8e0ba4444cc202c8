"""What a test may change and must put back: the rest of its worker's tests share it."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

__all__ = ["global_state"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
_OWN = "trt_eagle3"
_OF_PYTEST = "PYTEST_CURRENT_TEST"


def global_state() -> Mapping[str, Any]:
    """By name. Of the environment and of loggers only what is there already: imports add some."""
    return {
        "working directory": Path.cwd(),
        **{f"handler of {s.name}": signal.getsignal(s) for s in _SIGNALS},
        "torch.get_num_threads": torch.get_num_threads(),
        "torch.get_default_dtype": torch.get_default_dtype(),
        "torch.is_grad_enabled": torch.is_grad_enabled(),
        **{f"environment's {k}": v for k, v in os.environ.items() if k != _OF_PYTEST},
        **{f"logger {name}": state for name, state in _loggers()},
    }


def _loggers() -> list[tuple[str, Any]]:
    """The package's: level, handlers, filters, and whether the root hears of it."""
    known = logging.root.manager.loggerDict
    own = [(name, known[name]) for name in list(known) if name.split(".", 1)[0] == _OWN]
    used = [(name, found) for name, found in own if isinstance(found, logging.Logger)]
    return [
        (name, (found.level, tuple(found.handlers), tuple(found.filters), found.propagate))
        for name, found in used
    ]
