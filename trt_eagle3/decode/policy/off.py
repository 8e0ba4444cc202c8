"""Say why an engine does not draft, and how to undo it."""

from __future__ import annotations

import shlex
from pathlib import Path

from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.policy.tuning import TUNING_FILE

__all__ = ["off_reason"]


def off_reason(bundle: Path, config: SpeculationConfig, *, has_draft: bool) -> str | None:
    """Return why forwards of ``bundle`` may have no draft, with what undoes it; None if all do."""
    if not has_draft:
        return "the bundle has no draft. To draft, build it with draft.checkpoint"
    if not config.adaptive:
        return None
    always = "To draft always: trt-eagle3 build PAIR.yaml --set speculation.adaptive=false"
    table = bundle / TUNING_FILE
    if not table.is_file():
        return f"drafting was not expected to pay, by measured costs and acceptance. {always}"
    forget = f"To forget the tuning: rm {shlex.quote(str(table))}"
    return f"drafting was not expected to pay, by the costs in {table}. {forget}. {always}"
