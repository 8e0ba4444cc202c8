"""What the sections of a configuration have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

__all__ = ["PositiveInt", "Section", "UserPath"]

PositiveInt = Annotated[int, Field(gt=0, le=1 << 24)]


def _place(path: Path) -> Path:
    if "\0" in str(path):
        raise ValueError("a path holds no NUL character")
    return path.expanduser()


UserPath = Annotated[Path, AfterValidator(_place)]


class Section(BaseModel):
    """Frozen, and without keys that nobody knows."""

    model_config = ConfigDict(frozen=True, extra="forbid")
