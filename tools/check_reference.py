"""Write docs/checks.md from the registry of checks: ``python -m tools.check_reference``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.parity.fault import Fault
from tests.parity.faults import FAULTS
from tests.parity.test_option_pairs import table as option_pairs
from trt_eagle3.parity.checks.check_recorder import Check
from trt_eagle3.parity.checks.registry import CHECKS
from trt_eagle3.parity.checks.thresholds import THRESHOLDS

FILE = Path(__file__).parent.parent / "docs" / "checks.md"
_HEAD = """# Checks

For readers of a report: what does each check of `trt-eagle3 validate` compare, how much may differ,
and which faults does it catch?

Written by `python -m tools.check_reference` from `trt_eagle3/parity/checks/registry.py`, the
tolerances beside it, and the faults that the tests plant (`tests/parity/faults.py`). The guide is
[validate.md](validate.md).

Checks stand in the order in which data flows through the engine. The first that fails is where to
look.
"""
_CHECKS = """
## What each check compares

A check without a subject in the bundle is *not applicable*. Checks marked with * also run in
`--compare`, against the other bundle.

| check | stage | compares | tolerance | needs |
|---|---|---|---|---|
"""
_TOLERANCES = """
## Tolerances

By type of the engine. `p95, or a quarter of the worst`: 95 % of the rows must be within the
tolerance, and every row within four times that. `measured`: at least twice the worst value that
sound engines gave ([figures](measurements.md#tolerances-and-sound-engines)).

| tolerance | metric | float32 | float16 | bfloat16 | origin |
|---|---|---|---|---|---|
"""
_FAULTS = """
## Faults that are planted

The tests plant each fault in a tiny bundle or in the program around it. The first check of its row
must be the first that fails, the others must fail with it, and the report must name the tensor.
Without a fault nothing fails, nor for random geometries, drafts, trees and prompts
(`tests/parity/test_clean.py`).

| checks | planted fault | tensor named |
|---|---|---|
"""
_PAIRS = """
## Pairs of options

`options.tokens` compares answers that combine options. The table counts the answers that have both
features of a pair, in a validation of a bundle that takes images, has a prefix cache and runs out
of pages. On the diagonal stands a feature alone.

"""
_MEASURED = re.compile(r"at least twice the worst measured .+? Tolerances\)")
_SUBJECTS = {
    "_lacks_nothing": "",
    "lacks_tower": "a vision tower",
    "lacks_levels": "deepstack",
    "lacks_fp8": "an FP8 cache",
    "lacks_quantised": "quantised weights",
    "lacks_made": "weights quantised at build",
    "lacks_block": "of block kind",
    "lacks_confidence": "with a confidence head",
    "lacks_fuse": "of autoregressive kind",
    "lacks_heads": "with a selector or markov head",
}
"""What a bundle must have, by the name of ``Check.lacks``."""


def main() -> None:
    """Write the page; with ``--check`` say whether it is current."""
    text = page()
    if "--check" in sys.argv:
        sys.exit(
            FILE.read_text() != text and f"{FILE}: not current. Run python -m tools.check_reference"
        )
    FILE.write_text(text)


def page() -> str:
    """The whole page."""
    checks = "".join(_check(check) for check in CHECKS.values())
    tolerances = "".join(_tolerance(name) for name in THRESHOLDS)
    order = list(CHECKS)
    faults = sorted(FAULTS.values(), key=lambda fault: order.index(fault.check))
    planted = "".join(_fault(fault) for fault in faults)
    return (
        f"{_HEAD}{_CHECKS}{checks}{_TOLERANCES}{tolerances}{_FAULTS}{planted}"
        f"{_PAIRS}{option_pairs()}\n"
    )


def _check(check: Check) -> str:
    needs = ["a draft"] if check.needs_draft else []
    subject = _SUBJECTS[check.lacks.__name__]
    needs += [subject] if subject else []
    star = "" if check.needs_pytorch else " *"
    return (
        f"| `{check.name}`{star} | {check.stage} | {check.title} | `{check.threshold}` "
        f"| {', '.join(needs)} |\n"
    )


def _fault(fault: Fault) -> str:
    checks = ", ".join(f"`{name}`" for name in (fault.check, *fault.also))
    return f"| {checks} | {fault.what} | `{fault.tensor}` |\n"


def _tolerance(name: str) -> str:
    t = THRESHOLDS[name]
    bound = "at most" if t.better == "low" else "at least"
    values = " | ".join(f"{t.values[dtype]:.7g}" for dtype in ("float32", "float16", "bfloat16"))
    origin = _MEASURED.sub("measured", t.origin)
    return f"| `{name}` | {t.metric} ({bound}) | {values} | {origin} |\n"


if __name__ == "__main__":
    main()
