"""The plan that a server of an 8B begins with: nothing is known of its draft, and costs are such as
GPUs have.
"""

from __future__ import annotations

from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.adaptive_plan import AdaptivePlan
from trt_eagle3.decode.cycle_cost import prior_of
from trt_eagle3.decode.plan import Plan, widths
from trt_eagle3.decode.tree import configured_tree

__all__ = ["live_plan"]

_KV_SHARE = 9e-6  # bytes of a token in the KV cache over those of the weights


def live_plan(config: SpeculationConfig) -> AdaptivePlan:
    """An adaptive plan over the widths of the configured tree."""
    tree = configured_tree(config)
    sizes = widths(tree.num_nodes)
    return AdaptivePlan(config, Plan({1: tree}), sizes, prior_of(None, _KV_SHARE), {})
