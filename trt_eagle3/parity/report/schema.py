"""The JSON Schema of reports, kept beside the code:

``python -m trt_eagle3.parity.report.schema`` writes it anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trt_eagle3.parity.report.result import Report

__all__ = ["SCHEMA_FILE", "report_schema"]

SCHEMA_FILE = Path(__file__).parent / "report.schema.json"


def report_schema() -> dict[str, Any]:
    """What ``report.json`` and ``compare.json`` look like."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Report.model_json_schema(mode="serialization"),
    }


def main() -> None:
    """Write the file."""
    SCHEMA_FILE.write_text(json.dumps(report_schema(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
