"""Check that the safetensors library can read weight files, as other programs will."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from trt_eagle3.errors import UserError, clip

__all__ = ["check_headers"]


def check_headers(files: Iterable[Path]) -> None:
    """Check weight files with the safetensors library.

    Raises:
        UserError: the library rejects a file; the message has the file and the reason.
    """
    for file in sorted(set(files)):
        try:
            with safe_open(file, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{file}: not a valid safetensors file: {clip(error)}. Download it again."
            ) from error
