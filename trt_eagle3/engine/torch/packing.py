"""The *packed* order of quantised weights for our kernels.

Shapes: K inputs, N outputs.

In each row, every 16 columns are ordered by the four lanes of a product: lane t has columns 2t,
2t + 1, 2t + 8 and 2t + 9.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack_fp8", "pack_int4", "pack_int8", "packed_columns"]


def packed_columns(num_columns: int) -> Tensor:
    """Return the original column at each position of a packed FP8 row: int64 [K]."""
    # for 64 columns: [16s, halves, lanes, pairs] -> the values of a lane next to each other
    place = torch.arange(num_columns).view(-1, 4, 2, 4, 2)
    return place.permute(0, 3, 1, 2, 4).reshape(-1)


def pack_fp8(codes: Tensor) -> Tensor:
    """Pack float8_e4m3fn [N, K]; K must be a multiple of 64."""
    return pack_int8(codes.view(torch.uint8)).view(torch.float8_e4m3fn)


def pack_int8(codes: Tensor) -> Tensor:
    """Pack uint8 [N, K]; K must be a multiple of 64."""
    rows, columns = codes.shape
    parts = codes.view(rows, columns // 64, 4, 2, 4, 2)
    return parts.permute(0, 1, 4, 2, 3, 5).reshape(rows, columns).contiguous()


def pack_int4(codes: Tensor) -> Tensor:
    """Pack codes 0 to 15, uint8 [N, K], to words int32 [N, K / 8]; K a multiple of 128."""
    rows, columns = codes.shape
    # for 128 columns: [32s, 16s, halves, lanes, two of a pair]; a word has one lane and one 32
    parts = codes.view(rows, columns // 128, 4, 2, 2, 4, 2).permute(0, 1, 5, 2, 6, 3, 4)
    nibbles = parts.reshape(rows, columns // 8, 8)  # [two of a pair, 16s, halves]
    words = torch.zeros(rows, columns // 8, dtype=torch.int32, device=codes.device)
    for place in range(8):
        words |= nibbles[..., place].to(torch.int32) << 4 * place
    return words
