"""Atomic, durable writes of files and folders: whole or not at all, even after a power loss."""

from trt_eagle3.atomic_io.directory import atomic_directory, check_replaceable
from trt_eagle3.atomic_io.file import (
    PARTIAL,
    atomic_file,
    create_file,
    make_parents,
    place_file,
    write_file,
)
from trt_eagle3.atomic_io.lock import lock_file_of, output_lock
from trt_eagle3.atomic_io.manifest import MANIFEST_FILE, FolderKind

__all__ = [
    "MANIFEST_FILE",
    "PARTIAL",
    "FolderKind",
    "atomic_directory",
    "atomic_file",
    "check_replaceable",
    "create_file",
    "lock_file_of",
    "make_parents",
    "output_lock",
    "place_file",
    "write_file",
]
