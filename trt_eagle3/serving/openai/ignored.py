"""Define IgnoredKeys: paths of unread request keys, at any depth of the body."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from trt_eagle3.serving.errors import FieldError, nearest

__all__ = ["MAX_PATHS", "IgnoredKeys"]

MAX_PATHS = 8  # in a response header
_MAX_NAME = 40  # characters of a key
_MAX_PATH = 160  # characters of a whole path, such as that of a key in a message part


class IgnoredKeys:
    """Collects the paths of unread keys, such as ``messages[0].foo``.

    With strict fields the first such key is refused.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._paths: list[str] = []

    @property
    def paths(self) -> tuple[str, ...]:
        """The first eight paths, in ASCII."""
        return tuple(self._paths)

    def check(self, fields: Any, known: Collection[str], where: str = "") -> None:
        """Add the keys of ``fields`` that are not ``known``. Null values are skipped.

        Args:
            fields: a JSON value; only an object has keys.
            where: the path of ``fields``; empty for the body itself.
        Raises:
            FieldError: as ``add``.
        """
        if not isinstance(fields, Mapping):
            return
        for name, value in fields.items():
            if len(self._paths) == MAX_PATHS:
                return
            if value is not None and name not in known:
                shown = name[:_MAX_NAME]
                self.add(f"{where}.{shown}" if where else shown, known)

    def add(self, path: str, known: Collection[str] = ()) -> None:
        """Add a path. ``known``: keys that are read there, for a suggestion.

        Raises:
            FieldError: fields are strict.
        """
        path = ascii(path[:_MAX_PATH])[1:-1]
        if self._strict:
            likely = nearest(path.rpartition(".")[2], known) if known else "Leave it out."
            raise FieldError(f"{path}: not served here. {likely}", path, "unknown_parameter")
        if len(self._paths) < MAX_PATHS and path not in self._paths:
            self._paths.append(path)
