"""The options that recipes of trained pairs share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

__all__ = ["derived_args", "recipe_parser"]

_TARGET = Path(__file__).resolve().parent / "target"


def recipe_parser(
    doc: str | None,
    *,
    seed: int,
    batch_size: int,
    steps: Mapping[str, int],
    examples: int,
    chains: int,
) -> argparse.ArgumentParser:
    """A parser of what every recipe is told.

    Args:
        doc: of the recipe's file. seed, batch_size, examples, chains: defaults.
        steps: what is trained, in order, and of how many steps by default.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="gets target/, draft/ and metrics.json"
    )
    parser.add_argument("--seed", type=int, default=seed)
    parser.add_argument("--batch-size", type=int, default=batch_size)
    for name, count in steps.items():
        parser.add_argument(f"--{name}-steps", type=int, default=count)
    parser.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate")
    parser.add_argument("--workers", type=int, default=14, help="data processes")
    parser.add_argument("--print-every", type=int, default=250)
    parser.add_argument(
        "--per-kind",
        type=int,
        default=examples,
        help="held-out examples per kind in the evaluation",
    )
    parser.add_argument(
        "--chains", type=int, default=chains, help="of which this many are decoded speculatively"
    )
    return parser


def derived_args(doc: str | None, *, seed: int, steps: Mapping[str, int]) -> argparse.Namespace:
    """The command line of a recipe that begins with the dense pair, and may be told how long each
    part takes at most.
    """
    parser = recipe_parser(doc, seed=seed, batch_size=256, steps=steps, examples=200, chains=25)
    parser.add_argument("--source", type=Path, default=_TARGET, help="the dense target")
    for name in steps:
        parser.add_argument(f"--{name}-seconds", type=float, default=math.inf, help="at most")
    return parser.parse_args()
