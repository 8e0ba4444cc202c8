"""A rank whose weights are drawn on its device, for benchmarks without a checkpoint."""

from __future__ import annotations

from benchmarks.random_pair import draw_weights
from trt_eagle3.decode.parallel import follower

__all__ = ["main"]


def main(descriptor: int) -> None:
    """Serve the connection as ``follower.main`` does."""
    draw_weights()
    follower.main(descriptor)
