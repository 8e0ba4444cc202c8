"""One memory for all numbers of rows."""

from __future__ import annotations

import torch

from trt_eagle3.engine.torch.capture.pieces import RowBuffers, RowFormat, fill_rows

ROW = RowFormat(torch.float32, (0, 0, 4))
POSITIONS = RowFormat(torch.int32, (3, 0, 0))


def test_fewer_rows_share_the_memory_of_the_most() -> None:
    memory = RowBuffers(torch.device("cpu"))
    most, few = (memory.rows("inputs_embeds", ROW, count) for count in (64, 32))
    assert (most.shape, few.shape) == ((1, 64, 4), (1, 32, 4))
    assert most.data_ptr() == few.data_ptr() == memory.whole("inputs_embeds").data_ptr()
    others = memory.rows("features", ROW, 32)
    assert others.data_ptr() != few.data_ptr()


def test_rows_of_parts_follow_each_other_and_zeros_them() -> None:
    memory = RowBuffers(torch.device("cpu"))
    there = {
        "inputs_embeds": memory.rows("inputs_embeds", ROW, 8).fill_(9),
        "position_ids": memory.rows("position_ids", POSITIONS, 8).fill_(9),
    }
    parts = [
        {"inputs_embeds": torch.full((b, s, 4), v), "position_ids": torch.full((3, b, s), int(v))}
        for b, s, v in ((2, 2, 1.0), (1, 3, 2.0))
    ]
    fill_rows(there, parts)
    expected = [1, 1, 1, 1, 2, 2, 2, 0]
    assert there["inputs_embeds"][0, :, 0].tolist() == expected
    assert [axis[0].tolist() for axis in there["position_ids"]] == [expected] * 3
