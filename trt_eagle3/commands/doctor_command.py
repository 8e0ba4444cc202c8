"""doctor: what is installed, what works and what is missing."""

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
    """Say what is installed, what works and what is missing; with BUNDLE, whether it would run
    here.
    """
    from trt_eagle3.commands.doctor import bundle_line, check_bundle, diagnose
    from trt_eagle3.config import EngineConfig
    from trt_eagle3.engine.bundle import read_bundle

    record = read_bundle(bundle) if bundle else None
    found = diagnose(record.config.engine if record else None)
    if as_json:
        print_json(found.to_dict())
    else:
        out.print(*found.tables(), sep="\n\n")
        if bundle and record:
            out.print(f"\n{bundle_line(bundle, record)}", soft_wrap=True, markup=False)
    if bundle and record:
        check_bundle(bundle, record, found)
        if not as_json:
            from trt_eagle3.decode.loaded_bundle import LoadedBundle

            out.print(LoadedBundle.open(bundle).capacity, soft_wrap=True, highlight=False)
    else:
        found.check_engine(EngineConfig())
