"""Files that are small and take long to decode, and what decoding holds: processes and files."""

from __future__ import annotations

import io
from functools import lru_cache
from pathlib import Path

from PIL import Image


@lru_cache
def jpeg_of_scans(count: int, side: int = 2000) -> bytes:
    """A progressive JPEG, its last scan repeated until there are ``count``: decoders go over all
    pixels for each.
    """
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((side, side)).save(
        buffer, "JPEG", progressive=True, quality=50
    )
    data = buffer.getvalue()
    last, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    missing = count - data.count(b"\xff\xda")
    return data[:end] + data[last:end] * missing + data[end:]


def endless_jpeg() -> bytes:
    """A JPEG of some 300 KB that takes half a minute on a fast machine: for who is to give up."""
    return jpeg_of_scans(20_000)


def encode(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """An image file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def children() -> set[int]:
    """Process ids of this process's children, ended ones that nobody waited for among them."""
    while True:
        tasks = Path("/proc/self/task").iterdir()
        try:
            return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}
        except OSError:  # a thread ended meanwhile, and another one has its children
            continue


def open_files(folder: Path) -> list[str]:
    """Files in ``folder`` that this process has open."""
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [name for name in (str(link.readlink()) for link in links) if str(folder) in name]
