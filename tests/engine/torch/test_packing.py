"""The order in which quantised weights lie for the kernels."""

from __future__ import annotations

import torch

from trt_eagle3.engine.torch.packing import pack_fp8, pack_int4, packed_columns


def test_packed_columns_of_a_lane_are_its_operands() -> None:
    order = packed_columns(128).view(2, 4, 4, 2, 2)  # [64s, lanes, 16s, halves, pairs]
    for part, lane, block, half, one in ((0, 0, 0, 0, 0), (0, 3, 2, 1, 1), (1, 2, 3, 0, 1)):
        column = 64 * part + 16 * block + 8 * half + 2 * lane + one
        assert order[part, lane, block, half, one] == column


def test_pack_fp8_puts_codes_in_packed_order() -> None:
    bits = torch.randint(0, 120, (3, 256), dtype=torch.uint8)
    packed = pack_fp8(bits.view(torch.float8_e4m3fn))
    assert packed.dtype == torch.float8_e4m3fn
    assert torch.equal(packed.view(torch.uint8), bits[:, packed_columns(256)])


def test_pack_int4_puts_pairs_sixteen_bits_apart() -> None:
    codes = torch.randint(0, 16, (3, 256), dtype=torch.uint8)
    words = pack_int4(codes)
    assert (words.dtype, words.shape) == (torch.int32, (3, 32))
    for part, lane, word, block, half in ((0, 0, 0, 0, 0), (0, 1, 3, 1, 0), (1, 3, 2, 0, 1)):
        found = int(words[2, part * 16 + lane * 4 + word]) & 0xFFFFFFFF
        column = 128 * part + 32 * word + 16 * block + 8 * half + 2 * lane
        pair = [found >> 4 * (2 * block + half + 4 * one) & 15 for one in (0, 1)]
        assert pair == codes[2, column : column + 2].tolist()
