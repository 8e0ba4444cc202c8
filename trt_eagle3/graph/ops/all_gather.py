"""``out = the columns of all ranks, side by side``: logits whose vocabulary is cut by rank.

A graph on disk has no such node (see ``all_reduce.py``). The lowerings and the torch function are
those of a single rank.

Shapes: x T [n, W], the columns of this rank; out T [n, ranks * W], in the order of the ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_eagle3.graph.ops.op import Op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ALL_GATHER", "all_gather"]


def all_gather(x: Tensor) -> Tensor:
    """Return the columns of one rank: ``x [n, W]`` itself."""
    return x


ALL_GATHER = Op(
    inputs={"": ("x",)},
    outputs={"": ("out",)},
    lowering={"": "out = Identity (x)"},
    lowering_17={"": "out = Identity (x)"},
    torch_function=all_gather,
    plugin="AllGather",
)
