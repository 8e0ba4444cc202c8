"""The tiny pair for tests: its config, pointed at the checkpoints wherever pytest runs from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trt_eagle3.config import BuildConfig, load_config
from trt_eagle3.pipeline import build

__all__ = [
    "DRAFT",
    "MIXTURE",
    "QUESTIONS",
    "ROOT",
    "TARGET",
    "build_tiny",
    "build_tiny_moe",
    "tiny_config",
]

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "examples/tiny/target"
DRAFT = ROOT / "examples/tiny/draft"
MIXTURE = ROOT / "examples/tiny_moe"
QUESTIONS = ROOT / "examples/tiny/images/questions.json"


def tiny_config(
    *, target: Path = TARGET, draft: Path | None = DRAFT, **sections: dict[str, Any]
) -> BuildConfig:
    """``build_configs/tiny.yaml`` with other checkpoints, or keys of a section replaced.

    What is drafted follows no clock, unless ``speculation`` says ``adaptive``.
    """
    raw = load_config(ROOT / "build_configs/tiny.yaml").model_dump()
    raw["speculation"]["adaptive"] = False
    raw["prompts"] = None
    raw["target"]["checkpoint"] = str(target)
    raw["draft"] = None if draft is None else {"checkpoint": str(draft)}
    for name, changes in sections.items():
        raw[name] |= changes
    return BuildConfig.model_validate(raw)


def build_tiny(folder: Path, *, calibration: Path | None = None, **changes: Any) -> Path:
    """Build the tiny pair under ``folder``; returns the bundle."""
    return build(tiny_config(**changes), output=folder, calibration=calibration).path


def build_tiny_moe(folder: Path, **changes: Any) -> Path:
    """Build the trained mixture of experts under ``folder``; returns the bundle."""
    return build_tiny(folder, target=MIXTURE / "target", draft=MIXTURE / "draft", **changes)
