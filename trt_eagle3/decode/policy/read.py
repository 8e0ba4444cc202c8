"""Read the speculation policy of a bundle."""

from __future__ import annotations

from pathlib import Path

from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.policy.candidate import candidates_of, shrunk
from trt_eagle3.decode.policy.protocol import FixedPolicy, Policy
from trt_eagle3.decode.policy.speculation import SpeculationPolicy
from trt_eagle3.decode.policy.tuning import read_table
from trt_eagle3.decode.speculation.tree import configured_tree

__all__ = ["read_policy"]


def read_policy(bundle: Path, config: SpeculationConfig, device: str) -> Policy:
    """Make the policy of ``config``, with the costs that ``bench --tune`` measured, if any.

    Raises:
        UserError: as for ``read_table``.
    """
    tree = configured_tree(config)
    table = read_table(bundle, config, tree.num_nodes, device)
    if not config.adaptive:
        return FixedPolicy(tree)
    policy = SpeculationPolicy(candidates_of(config))
    for entry in table.entries if table else ():
        for num_nodes, cycle_ms in entry.cycle_ms.items():
            policy.prime(shrunk(config, num_nodes), entry.batch_size, 1e-3 * cycle_ms)
    return policy
