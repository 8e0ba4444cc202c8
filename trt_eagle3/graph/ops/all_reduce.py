"""``out = sum of x over all ranks``: rows that each rank of a tensor-parallel engine has in part.

Every rank adds the ranks' values in the order of the ranks, so all get the same bits. A graph on
disk has no such node: ``graph/shard.py`` adds it when a rank loads the graph. The lowerings and the
torch function are those of a single rank, whose part is the whole.
``engine/runtime/collectives.py`` computes the sum of several.

Shapes: x T [n, W]; out T [n, W].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_eagle3.graph.ops.op import Op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ALL_REDUCE", "all_reduce"]


def all_reduce(x: Tensor) -> Tensor:
    """Return the sum over one rank: ``x [n, W]`` itself."""
    return x


ALL_REDUCE = Op(
    inputs={"": ("x",)},
    outputs={"": ("out",)},
    lowering={"": "out = Identity (x)"},
    lowering_17={"": "out = Identity (x)"},
    torch_function=all_reduce,
    plugin="AllReduce",
)
