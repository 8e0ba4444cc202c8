"""Launches that come up before the one before them has ended must compute what they compute one
by one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

REPLAYS = 5


def check_overlap(first: Tensor, launches: list[Callable[[Tensor], Tensor]]) -> None:
    """``launches`` each take the output of the one before: in a CUDA graph the same bits as with
    a wait after each.
    """
    wanted = first
    for launch in launches:
        wanted = launch(wanted)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = first
        for launch in launches:
            got = launch(got)
    for _ in range(REPLAYS):
        got.fill_(torch.nan)
        graph.replay()
        assert torch.equal(got, wanted)
