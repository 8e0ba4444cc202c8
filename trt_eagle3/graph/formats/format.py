"""WeightFormat: the interface of weight formats, and code that they share.

Shapes: n rows of a weight [out, in], G groups of columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from trt_eagle3.graph.weights import Quantised

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IntegerFormat", "IntegerRows", "Stored", "WeightFormat", "WeightNodes", "scale_rows"]

Stored = Mapping[str, "Tensor"]
"""The whole tensors of a quantised part by role, mapped from disk."""


class WeightNodes(Protocol):
    """Add standard nodes that compute a weight (``graph/weight_nodes.py``)."""

    def stored(self, role: str) -> str:
        """Return the tensor of a role, as stored."""
        ...

    def constant(self, values: Any) -> str:
        """Add a small constant from a NumPy array."""
        ...

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output."""
        ...


class WeightFormat(Protocol):
    """One way in which checkpoints store quantised weights. Formats have no state."""

    def dequantise(self, part: Quantised, stored: Stored, rows: slice) -> Tensor:
        """Return the values of ``rows``: float32 [n, in]."""
        ...


class NodeFormat(WeightFormat, Protocol):
    """A format that standard nodes can dequantise."""

    def dequantise_nodes(self, part: Quantised, nodes: WeightNodes) -> str:
        """Add the nodes that compute ``dequantise`` of all rows. Return the values' name."""
        ...


@dataclass(frozen=True)
class IntegerRows:
    """Rows of a weight of whole numbers: value = (code - zero) * scale.

    Attributes:
        codes: uint8 [n, in].
        zeros: uint8 [n, G].
        scales: float32 [n, G].
        groups: int64 [in], the group of each column.
    """

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    groups: Tensor

    def values(self) -> Tensor:
        """Return float32 [n, in]."""
        whole = self.codes.float() - self.zeros.float()[:, self.groups]
        return whole * self.scales[:, self.groups]


class IntegerFormat(ABC):
    """A format of whole numbers of ``bits``, in groups of columns. ``rows`` unpacks them."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    @abstractmethod
    def rows(self, part: Quantised, stored: Stored, rows: slice) -> IntegerRows:
        """Return the whole numbers of ``rows``, with their zero points and scales."""

    def dequantise(self, part: Quantised, stored: Stored, rows: slice) -> Tensor:
        """Implement ``WeightFormat.dequantise``."""
        return self.rows(part, stored, rows).values()


def groups_of(part: Quantised, stored: Stored) -> Tensor:
    """Return int64 [in]: the group of each column."""
    import torch

    if "g_idx" in stored:
        return stored["g_idx"].long()
    device = stored["codes"].device
    return torch.arange(part.shape[1], device=device) // part.block[1]


def scale_rows(part: Quantised, scale: Tensor, rows: slice) -> Tensor:
    """Return float32 [n, in] or [n, 1]: the scale of every value of ``rows``."""
    import torch

    first, end, _ = rows.indices(part.shape[0])
    grid = scale.float().reshape(-1, -(-part.shape[1] // part.block[1]))
    taken = grid[torch.arange(first, end, device=grid.device) // part.block[0]]
    if taken.shape[1] == 1:
        return taken
    return taken.repeat_interleave(part.block[1], dim=1)[:, : part.shape[1]]


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack ``words`` int32 [..., w] to uint8 [..., w * 32 / bits], lowest bits first."""
    import torch

    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    numbers = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return numbers.to(torch.uint8).flatten(-2)
