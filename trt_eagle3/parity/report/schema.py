"""The JSON Schema of reports, stored beside the code.

``python -m trt_eagle3.parity.report.schema`` rewrites it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trt_eagle3.parity.report.result import Report

__all__ = ["SCHEMA_FILE", "report_schema"]

SCHEMA_FILE = Path(__file__).parent / "report.schema.json"


def report_schema() -> dict[str, Any]:
    """Return the schema of ``report.json`` and ``compare.json``."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Report.model_json_schema(mode="serialization"),
    }


def main() -> None:
    """Write the schema file."""
    SCHEMA_FILE.write_text(json.dumps(report_schema(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
