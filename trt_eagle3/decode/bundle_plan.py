"""The plan that a bundle is served by, from its config and what ``bench --tune`` measured of it."""

from __future__ import annotations

from pathlib import Path

from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.acceptance_rate import Level, levels_of
from trt_eagle3.decode.adaptive_plan import AdaptivePlan
from trt_eagle3.decode.cycle_cost import ExpertReads, prior_of
from trt_eagle3.decode.plan import Plan, plan_of, shrunk, widths
from trt_eagle3.decode.tree import configured_tree
from trt_eagle3.decode.tuning import TuningTable, read_table

__all__ = ["acceptance_prior", "read_adaptive_plan"]


def read_adaptive_plan(
    bundle: Path,
    config: SpeculationConfig,
    device: str,
    kv_share: float,
    experts: ExpertReads | None = None,
) -> AdaptivePlan:
    """The plan that a bundle is served by; its table, where it was tuned, is what it begins with.

    Args:
        kv_share: bytes of a token in the KV cache over those of the weights. experts: of a
            mixture's target.
    Raises:
        UserError: as for ``read_table``.
    """
    tree = configured_tree(config)
    table = read_table(bundle, config, tree.num_nodes, device)
    return AdaptivePlan(
        config,
        Plan({1: tree}) if table is None else plan_of(table),
        widths(tree.num_nodes),
        prior_of(table, kv_share, experts),
        acceptance_prior(table, config),
    )


def acceptance_prior(table: TuningTable | None, config: SpeculationConfig) -> dict[Level, float]:
    """Rates by level of the widest trees that ``bench --tune`` ran."""
    found: dict[Level, float] = {}
    for num_nodes, shares in sorted(table.acceptance.items()) if table else ():
        above = 1.0
        for level, share in zip(levels_of(shrunk(config, num_nodes)), shares, strict=False):
            if above > 0:
                found[level] = share / above
            above = share
    return found
