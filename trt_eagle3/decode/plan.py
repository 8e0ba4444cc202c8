"""How far to speculate: the tree for each batch size, by a table measured on the machine that
serves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.decoder import AnyTree
from trt_eagle3.decode.dynamic_tree import DynamicTree
from trt_eagle3.decode.tree import Tree, best_first, configured_tree, static_tree
from trt_eagle3.engine.machine import machine_name
from trt_eagle3.errors import UserError
from trt_eagle3.io.json_file import read_json_object

__all__ = ["TUNING_FILE", "Plan", "TuningEntry", "TuningTable", "plan_of", "read_plan", "shrunk"]

TUNING_FILE = "tuning.json"

_log = logging.getLogger("trt_eagle3")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TuningEntry(_Record):
    """What pays at one batch size.

    Attributes:
        num_draft_tokens: nodes of the tree, the root included; 1 is plain decoding.
        tokens_per_second: expected of the batch, by ``num_draft_tokens``: acceptance length over
            cycle time.
        cycle_ms: measured, by ``num_draft_tokens``.
    """

    batch_size: Annotated[int, Field(gt=0)]
    num_draft_tokens: Annotated[int, Field(gt=0)]
    tokens_per_second: Mapping[int, float]
    cycle_ms: Mapping[int, float]


class TuningTable(_Record):
    """``tuning.json`` of a bundle, written by ``bench --tune``.

    Attributes:
        measured_at: UTC, ISO 8601. machine: ``engine.machine.machine_name`` of where.
        acceptance: how often the draft was right so deep, by ``num_draft_tokens`` (of chains and
            trees alike: the share of cycles that accepted a node at depth 1, 2, ...).
    """

    schema_version: Literal[1] = 1
    measured_at: str
    machine: str
    speculation: SpeculationConfig
    acceptance: Mapping[int, tuple[float, ...]]
    entries: Annotated[tuple[TuningEntry, ...], Field(min_length=1)]


class Plan:
    """The tree for each batch size; between measured sizes that of the next larger one counts."""

    def __init__(self, trees: Mapping[int, AnyTree | None]) -> None:
        """``trees``: by batch size, at least one; None is plain decoding."""
        self._trees = sorted(trees.items(), key=lambda item: item[0])

    @property
    def speculates(self) -> bool:
        """Whether it ever does."""
        return any(tree is not None for _, tree in self._trees)

    def tree_for(self, batch_size: int) -> AnyTree | None:
        """The tree for so many sequences; None is plain decoding."""
        return next((tree for size, tree in self._trees if size >= batch_size), self._trees[-1][1])


def plan_of(table: TuningTable) -> Plan:
    """The plan of a table: at every batch size as many tokens as paid best."""
    return Plan(
        {e.batch_size: shrunk(table.speculation, e.num_draft_tokens) for e in table.entries}
    )


def shrunk(config: SpeculationConfig, num_draft_tokens: int) -> AnyTree | None:
    """The configured tree cut to ``num_draft_tokens`` nodes: a shorter chain, or the likeliest
    nodes; None of 1.
    """
    if num_draft_tokens == 1:
        return None
    if config.mode == "dynamic":
        return DynamicTree(min(config.steps, num_draft_tokens - 1), config.topk, num_draft_tokens)
    whole = static_tree(config)
    return Tree.from_paths(best_first(whole.paths)[: num_draft_tokens - 1])


def read_plan(bundle: Path, config: SpeculationConfig, device: str) -> Plan:
    """The plan of a bundle; without ``tuning.json`` it always speculates as configured.

    A table from another machine counts, with a warning.

    Raises:
        UserError: a damaged table, or one that was measured for another speculation.
    """
    file = bundle / TUNING_FILE
    again = f"Measure again: trt-eagle3 bench {bundle} --tune"
    try:
        table = TuningTable.model_validate(read_json_object(file))
    except FileNotFoundError:
        return Plan({1: configured_tree(config)})
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: a damaged table. {again}") from error
    most = configured_tree(config).num_nodes
    if table.speculation != config or any(e.num_draft_tokens > most for e in table.entries):
        raise UserError(f"{file}: measured for another speculation. {again}")
    if table.machine != machine_name(device):
        _log.warning(
            "%s was measured on %s, this is %s. %s",
            file,
            table.machine,
            machine_name(device),
            again,
        )
    return plan_of(table)
