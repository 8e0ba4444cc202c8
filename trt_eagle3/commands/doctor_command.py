"""Print what is installed, what works and what is missing (``doctor``)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from trt_eagle3.commands.console import (
    json_option,
    print_json,
    show,
)

if TYPE_CHECKING:
    from trt_eagle3.commands.doctor import Diagnosis

__all__ = ["doctor"]


@click.command()
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@json_option
def doctor(bundle: Path | None, as_json: bool) -> None:
    """Print what is installed, what works and what is missing.

    With BUNDLE also whether it runs here.
    """
    if bundle is None:
        _doctor_machine(as_json)
    else:
        _doctor_bundle(bundle, as_json)


def _doctor_machine(as_json: bool) -> None:
    from trt_eagle3.commands.doctor import diagnose
    from trt_eagle3.config import EngineConfig

    found = diagnose()
    if as_json:
        print_json(found.to_dict())
    else:
        _show_tables(found)
    found.check_engine(EngineConfig())


def _doctor_bundle(bundle: Path, as_json: bool) -> None:
    """Print the findings; the last line is ``runs here``, or the error with the reason."""
    from trt_eagle3.commands.doctor import bundle_line, bundle_status, diagnose
    from trt_eagle3.engine.bundle.read import read_bundle

    record = read_bundle(bundle)
    found = diagnose(record.config.engine)
    status = bundle_status(bundle, record, found)
    if as_json:
        print_json({**found.to_dict(), "bundle": status.to_dict()})
    else:
        _show_tables(found)
        show("", bundle_line(bundle, record))
    status.check()
    if not as_json:
        show(f"{bundle}: runs here: {status.capacity}")


def _show_tables(found: Diagnosis) -> None:
    there, works = found.tables()
    show(there, "", works)
