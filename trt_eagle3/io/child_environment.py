"""The environment of child processes."""

from __future__ import annotations

import os
from pathlib import Path

import trt_eagle3

__all__ = ["API_KEY_VARIABLE", "PACKAGE_ROOT", "child_environment"]

API_KEY_VARIABLE = "TRT_EAGLE3_API_KEY"
PACKAGE_ROOT = str(Path(trt_eagle3.__file__).resolve().parent.parent)
"""The folder that holds this package. It may be missing in ``sys.path``."""
_SECRETS = frozenset({API_KEY_VARIABLE, "ADMIN_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})


def child_environment(**more: str) -> dict[str, str]:
    """Return this process's variables without secrets, plus ``more``. No child needs secrets."""
    return {name: value for name, value in os.environ.items() if name not in _SECRETS} | more
