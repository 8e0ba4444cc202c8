"""The token embedding table; on the CPU, the file is memory-mapped and rows are read on use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.checkpoint.tensor_index import FLOAT_DTYPES, TensorRef
from trt_eagle3.dtype import dtype_of_safetensors
from trt_eagle3.engine.runtime.weights import materialise
from trt_eagle3.errors import UserError
from trt_eagle3.graph.weights import WeightExpr, part_of
from trt_eagle3.host_copy import to_device

__all__ = ["EmbeddingTable", "TableDifference", "table_difference"]

_MOST_ROWS = 4096  # compared, evenly spaced: a whole table has gigabytes


class EmbeddingTable:
    """Token id -> embedding, for target and draft. The lookup is outside the graphs."""

    def __init__(
        self, ref: TensorRef, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        if ref.dtype not in FLOAT_DTYPES:
            raise UserError(
                f"{ref.file}: {ref.name}: expected float32, float16 or bfloat16, got {ref.dtype}"
            )
        stored = dtype_of_safetensors(ref.dtype)
        table = WeightExpr((part_of(ref, lambda r: r.file.name),), stored)
        self._table = materialise(table, ref.file.parent, stored, device)
        self._dtype = dtype

    @property
    def hidden_size(self) -> int:
        """Channels per token."""
        return self._table.shape[1]

    @property
    def num_tokens(self) -> int:
        """Rows of the table."""
        return self._table.shape[0]

    @property
    def device(self) -> torch.device:
        """The device of the table."""
        return self._table.device

    @property
    def dtype(self) -> torch.dtype:
        """The compute type."""
        return self._dtype

    def lookup(self, token_ids: Tensor) -> Tensor:
        """Look up embeddings ``[..., H]`` of ``token_ids`` (int64), in the compute type, on the
        table's device.
        """
        return self._table[to_device(token_ids, self._table.device)].to(self._dtype)


@dataclass(frozen=True)
class TableDifference:
    """How a draft's own token table differs from its target's, over ``num_rows`` rows.

    Attributes:
        relative: norm of the difference over the norm of the target's rows. A copy has 0,
            unrelated tables of the same scale 1.4.
        cosine: mean cosine of the rows. A copy has 1 at any scale, unrelated tables 0.
    """

    relative: float
    cosine: float
    num_rows: int

    @property
    def is_unrelated(self) -> bool:
        """Whether the draft's table was not derived from the target's."""
        return not self.cosine > 0.1


def table_difference(own: TensorRef, target: TensorRef) -> TableDifference | None:
    """Compare the token table ``own`` of a draft with that of its ``target``, both [V, H].

    Returns None if the shapes differ.

    Raises:
        UserError: a table is not of a float type.
    """
    if own.shape != target.shape:
        return None
    rows = torch.arange(0, own.shape[0], -(-own.shape[0] // _MOST_ROWS))
    a, b = (EmbeddingTable(ref, torch.float32).lookup(rows).double() for ref in (own, target))
    cosines = torch.nn.functional.cosine_similarity(a, b, dim=1)
    return TableDifference(float((a - b).norm() / b.norm()), float(cosines.mean()), len(rows))
