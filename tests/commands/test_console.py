"""What the commands' console takes its width from."""

from __future__ import annotations

import sys

import pytest

from trt_eagle3.commands import console


def test_console_without_stdout_is_as_wide_as_into_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services may start with stdout closed."""
    monkeypatch.setattr(sys, "stdout", None)
    assert console._width() == 160
