"""Write reports: JSON, the page, JUnit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

from trt_eagle3.atomic_io import write_file
from trt_eagle3.errors import UserError
from trt_eagle3.parity.report.html import report_html
from trt_eagle3.parity.report.result import CheckResult, Report

__all__ = ["check_writable", "write_junit", "write_report"]


def check_writable(*files: Path) -> None:
    """Check that the report files can be written, before anything is computed; writes nothing.

    Raises:
        UserError: a file cannot be written; the message names it.
    """
    for file in files:
        there = next(place for place in (file, *file.absolute().parents) if place.exists())
        if file.is_dir() or (there != file and not there.is_dir()) or not os.access(there, os.W_OK):
            raise _refusal(
                file,
                f"{there} is not writable" if there != file else "it is a folder or not writable",
            )


def write_report(report: Report, folder: Path | None = None) -> tuple[str, ...]:
    """Write ``report.json`` and ``report.html``, or ``compare.json`` and ``compare.html``.

    Returns their paths.

    Args:
        folder: default: ``parity/`` of the bundle.

    Raises:
        UserError: the folder cannot be written.
    """
    folder = folder or Path(report.bundle.path) / "parity"
    stem = "compare" if report.mode == "compare" else "report"
    texts = {f"{stem}.json": report.to_json() + "\n", f"{stem}.html": report_html(report)}
    return tuple(_write(folder / name, text, _replace) for name, text in texts.items())


def write_junit(report: Report, file: Path) -> str:
    """Write one JUnit test case per check, for a CI system; return the path."""
    suite = ET.Element(
        "testsuite",
        name=f"trt-eagle3 validate {report.bundle.name}",
        tests=str(len(report.checks)),
        failures=str(report.num_checks("failed")),
        skipped=str(report.num_checks("skipped") + report.num_checks("not_applicable")),
        errors="0",
        time=f"{sum(report.seconds.values()):.3f}",
        timestamp=report.created_at,
    )
    for check in report.checks:
        _add_case(suite, check)
    tree = ET.ElementTree(ET.Element("testsuites"))
    root = tree.getroot()
    assert root is not None
    root.append(suite)
    ET.indent(tree)
    return _write(
        file, ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n", _write_into
    )


def _add_case(suite: ET.Element, check: CheckResult) -> None:
    case = ET.SubElement(
        suite, "testcase", classname=f"validate.{check.stage.replace(' ', '_')}", name=check.name
    )
    if check.status == "skipped":
        ET.SubElement(case, "skipped", message=check.reason)
    elif check.status == "not_applicable":  # JUnit has no status for it
        ET.SubElement(case, "skipped", message=f"not applicable: {check.reason}")
    elif check.status == "failed":
        allowed = f"allowed {check.comparison} {check.tolerance:.6g}"
        message = f"{check.metric}: {check.measured:.6g}, {allowed}"
        place = " ".join(
            filter(
                None,
                (check.case, check.tensor, f"row {check.row}" if check.row is not None else ""),
            )
        )
        ET.SubElement(
            case, "failure", message=message, type="check"
        ).text = f"{place}\n{check.detail}".strip()


def _replace(file: Path, text: str) -> None:
    write_file(file, text.encode())  # deployments hard-link the old file, which must not change


def _write_into(file: Path, text: str) -> None:
    """Write into the existing file: it may be a pipe."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def _write(file: Path, text: str, write: Callable[[Path, str], None]) -> str:
    try:
        write(file, text)
    except OSError as error:
        raise _refusal(file, error.strerror or str(error)) from error
    return str(file)


def _refusal(file: Path, reason: str) -> UserError:
    return UserError(
        f"{file}: cannot write the report: {reason}. Name another place (--output DIR, --junit "
        "FILE)."
    )
