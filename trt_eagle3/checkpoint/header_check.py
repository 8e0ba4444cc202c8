"""Weight files must be readable by others than this program too."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from trt_eagle3.errors import UserError, clip

__all__ = ["check_headers"]


def check_headers(files: Iterable[Path]) -> None:
    """Refuse weight files that the safetensors library refuses.

    Raises:
        UserError: naming the file and the library's reason.
    """
    for file in sorted(set(files)):
        try:
            with safe_open(file, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{file}: not a sound safetensors file: {clip(error)}. Download it again."
            ) from error
