"""The tuning table: step costs that ``bench --tune`` measured on the serving machine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from trt_eagle3.config import SpeculationConfig
from trt_eagle3.engine.runtime.machine import machine_name
from trt_eagle3.errors import UserError
from trt_eagle3.io.json_file import read_json_object

__all__ = ["TUNING_FILE", "TuningEntry", "TuningTable", "read_table"]

TUNING_FILE = "tuning.json"

_log = logging.getLogger("trt_eagle3")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # schema 1 also had choices


class TuningEntry(_Record):
    """Step costs at one batch size.

    Attributes:
        cycle_ms: milliseconds of a step by tree size in nodes; 1: no speculation.
    """

    batch_size: Annotated[int, Field(gt=0)]
    cycle_ms: Annotated[Mapping[Annotated[int, Field(gt=0)], float], Field(min_length=1)]


class TuningTable(_Record):
    """``tuning.json`` of a bundle, written by ``bench --tune``: step costs on one machine.

    It holds no acceptance rates: the policy learns them while serving.

    Attributes:
        measured_at: UTC, ISO 8601.
        machine: ``engine.runtime.machine.machine_name`` of the measuring machine.
    """

    schema_version: Literal[1, 2] = 2
    measured_at: str
    machine: str
    speculation: SpeculationConfig
    entries: Annotated[tuple[TuningEntry, ...], Field(min_length=1)]


def read_table(
    bundle: Path, config: SpeculationConfig, most_nodes: int, device: str
) -> TuningTable | None:
    """Read the table of a bundle; None if it was never tuned.

    A table of another machine is used with a warning. ``most_nodes``: size of the configured tree.

    Raises:
        UserError: the table is damaged, or was measured for another speculation config.
    """
    file = bundle / TUNING_FILE
    again = f"Measure again: trt-eagle3 bench {bundle} --tune"
    try:
        table = TuningTable.model_validate(read_json_object(file))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: a damaged table. {again}") from error
    too_wide = any(max(entry.cycle_ms) > most_nodes for entry in table.entries)
    if not table.speculation.same_tree(config) or too_wide:
        raise UserError(f"{file}: measured for another speculation. {again}")
    if table.machine != machine_name(device):
        _log.warning(
            "%s was measured on %s, this is %s. %s",
            file,
            table.machine,
            machine_name(device),
            again,
        )
    return table
