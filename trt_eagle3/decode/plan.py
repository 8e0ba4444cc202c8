"""How far to speculate: the tree for each batch size, by a table measured on the machine that serves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.decoder import AnyTree
from trt_eagle3.decode.dynamic_tree import DynamicTree
from trt_eagle3.decode.tree import Tree, best_first, configured_tree, static_tree
from trt_eagle3.errors import UserError

__all__ = ["TUNING_FILE", "Plan", "TuningEntry", "TuningTable", "read_plan", "shrunk"]

TUNING_FILE = "tuning.json"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TuningEntry(_Record):
    """What pays at one batch size.

    Attributes:
        num_draft_tokens: nodes of the tree, the root included; 1 is plain decoding.
        tokens_per_second: expected of the batch, by ``num_draft_tokens``: acceptance over cycle time.
        cycle_ms: measured, by ``num_draft_tokens``.
    """

    batch_size: Annotated[int, Field(gt=0)]
    num_draft_tokens: Annotated[int, Field(gt=0)]
    tokens_per_second: dict[int, float]
    cycle_ms: dict[int, float]


class TuningTable(_Record):
    """``tuning.json`` of a bundle, written by ``bench --tune``.

    Attributes:
        acceptance: share of cycles that accept so deep, by ``num_draft_tokens``.
    """

    schema_version: int = 1
    measured_at: str
    machine: str
    speculation: SpeculationConfig
    acceptance: dict[int, tuple[float, ...]]
    entries: tuple[TuningEntry, ...]


class Plan:
    """The tree for each batch size: the configured one, or as large as the table says."""

    def __init__(self, config: SpeculationConfig, table: TuningTable | None = None) -> None:
        self._full = configured_tree(config)
        self._trees: list[tuple[int, AnyTree | None]] = []
        for entry in sorted(table.entries, key=lambda e: e.batch_size) if table else ():
            tree = shrunk(config, entry.num_draft_tokens) if entry.num_draft_tokens > 1 else None
            self._trees.append((entry.batch_size, tree))

    def tree_for(self, batch_size: int) -> AnyTree | None:
        """The tree for so many sequences, by the nearest measured size from there on; None is plain decoding."""
        if not self._trees:
            return self._full
        return next((tree for size, tree in self._trees if size >= batch_size), self._trees[-1][1])


def shrunk(config: SpeculationConfig, num_draft_tokens: int) -> AnyTree:
    """The configured tree cut to ``num_draft_tokens`` nodes: a shorter chain, or the likeliest nodes of a tree."""
    if config.mode == "chain":
        return static_tree(config.model_copy(update={"steps": num_draft_tokens - 1, "num_draft_tokens": None}))
    if config.mode == "dynamic":
        return DynamicTree(config.steps, config.topk, num_draft_tokens)
    whole = static_tree(config)
    return Tree.from_paths(best_first(whole.paths)[: num_draft_tokens - 1])


def read_plan(bundle: Path, config: SpeculationConfig) -> Plan:
    """The plan of a bundle; without ``tuning.json`` it always speculates as configured.

    Raises:
        UserError: a damaged table, or one that was measured for another speculation.
    """
    file = bundle / TUNING_FILE
    if not file.exists():
        return Plan(config)
    try:
        table = TuningTable.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        raise UserError(f"{file}: a damaged table. Measure again: trt-eagle3 bench {bundle} --tune") from error
    if table.speculation != config:
        raise UserError(f"{file}: measured for another speculation. Measure again: trt-eagle3 bench {bundle} --tune")
    return Plan(config, table)
