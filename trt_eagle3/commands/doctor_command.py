"""Print what is installed, what works and what is missing (``doctor``)."""

from __future__ import annotations

from pathlib import Path

import click

from trt_eagle3.commands.console import (
    json_option,
    out,
    print_json,
)

__all__ = ["doctor"]


@click.command()
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@json_option
def doctor(bundle: Path | None, as_json: bool) -> None:
    """Print what is installed, works and is missing; with BUNDLE, whether it runs here."""
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
        out.print(*found.tables(), sep="\n\n")
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
        out.print(*found.tables(), sep="\n\n")
        out.print(f"\n{bundle_line(bundle, record)}", soft_wrap=True, markup=False)
    status.check()
    if not as_json:
        out.print(f"{bundle}: runs here: {status.capacity}", soft_wrap=True, highlight=False)
