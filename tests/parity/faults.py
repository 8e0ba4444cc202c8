"""The catalogue of planted faults: what each one does, and the check and tensor that must name it.

``docs/validate.md`` shows it as a table: ``python -m tests.parity.faults`` writes that table, and
the tolerances'.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.parity.fault import Fault
from tests.parity.faults_batch import BATCH
from tests.parity.faults_draft import DRAFT
from tests.parity.faults_inputs import INPUTS
from tests.parity.faults_kv import KV
from tests.parity.faults_options import OPTIONS
from tests.parity.faults_sampling import SAMPLING
from tests.parity.faults_target import TARGET
from tests.parity.faults_weights import WEIGHTS
from tests.tiny import ROOT
from trt_eagle3.parity.checks.registry import CHECKS
from trt_eagle3.parity.checks.thresholds import THRESHOLDS

DOCUMENT = ROOT / "docs/validate.md"
FAULTS: Mapping[str, Fault] = {
    **INPUTS,
    **WEIGHTS,
    **KV,
    **TARGET,
    **DRAFT,
    **BATCH,
    **SAMPLING,
    **OPTIONS,
}


def fault_table() -> str:
    """The catalogue as Markdown."""
    rows = [
        f"| {fault.what} | {CHECKS[fault.check].stage} | `{fault.check}` | `{fault.tensor}` |"
        for fault in FAULTS.values()
    ]
    head = [
        "| planted fault | stage named | first check that fails | tensor named |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows])


def threshold_table() -> str:
    """The tolerances as Markdown."""
    rows = [
        f"| `{name}` | {t.metric} ({'at most' if t.better == 'low' else 'at least'}) | "
        + " | ".join(f"{t.values[dtype]:.7g}" for dtype in ("float32", "float16", "bfloat16"))
        + " |"
        for name, t in THRESHOLDS.items()
    ]
    head = ["| threshold | metric | float32 | float16 | bfloat16 |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows])


def with_tables(text: str) -> str:
    """A document with the tables of today between their marks."""
    for name, table in (("thresholds", threshold_table()), ("faults", fault_table())):
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"
    return text


def main(document: Path = DOCUMENT) -> None:
    """Write the tables."""
    document.write_text(with_tables(document.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
