"""Trees of any shape."""

from __future__ import annotations

import random

from trt_eagle3.decode.speculation.tree import Tree


def random_tree(chance: random.Random) -> Tree:
    """Of one to nine drafted tokens."""
    paths: list[tuple[int, ...]] = []
    for _ in range(chance.randint(1, 9)):
        parent = chance.choice([(), *paths])
        paths.append((*parent, sum(p[:-1] == parent for p in paths)))
    return Tree.from_paths(paths)
