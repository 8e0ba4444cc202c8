"""Define the base class of all config sections, and shared field types."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

__all__ = ["PositiveInt", "Section", "UserPath"]

PositiveInt = Annotated[int, Field(gt=0, le=1 << 24)]


def _place(path: Path) -> Path:
    if "\0" in str(path):
        raise ValueError("expected a path without NUL characters")
    return path.expanduser()


UserPath = Annotated[Path, AfterValidator(_place)]


class Section(BaseModel):
    """A frozen section that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")
