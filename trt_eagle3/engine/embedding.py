"""The token table: on the CPU mapped from its file, so that rows are read as they are asked for."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trt_eagle3.checkpoint.tensor_index import FLOAT_DTYPES, TensorRef
from trt_eagle3.dtype import dtype_of_safetensors
from trt_eagle3.errors import UserError, clip

__all__ = ["EmbeddingTable"]


class EmbeddingTable:
    """Token id -> embedding, for target and draft alike; the lookup stands outside the graphs."""

    def __init__(
        self, ref: TensorRef, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        if ref.dtype not in FLOAT_DTYPES:
            raise UserError(
                f"{ref.file}: {ref.name}: expected float32, float16 or bfloat16, got {ref.dtype}"
            )
        try:
            # mode c: copy on write, so that torch may call the memory its own
            raw = np.memmap(
                ref.file, dtype=np.uint8, mode="c", offset=ref.offset, shape=(ref.num_bytes,)
            )
            stored = dtype_of_safetensors(ref.dtype).torch
            self._table = torch.from_numpy(raw).view(stored).view(ref.shape).to(device)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(
                f"{ref.file}: cannot map {ref.name}: {clip(error)}. Rebuild the bundle."
            ) from error
        self._dtype = dtype

    @property
    def hidden_size(self) -> int:
        """Channels per token."""
        return self._table.shape[1]

    def lookup(self, token_ids: Tensor) -> Tensor:
        """Embeddings ``[..., H]`` in the compute type of ``token_ids`` (int64), on the table's
        device.
        """
        return self._table[token_ids.to(self._table.device, non_blocking=True)].to(self._dtype)
