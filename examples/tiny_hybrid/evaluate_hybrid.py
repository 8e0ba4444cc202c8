"""Evaluate a draft of the tiny hybrid on held-out data, as ``examples/tiny/evaluate.py`` does.

python examples/tiny_hybrid/evaluate_hybrid.py [--draft dflash2] [--per-kind 100] [--chains 25]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tiny"))

from evaluate import Pair, evaluate, load_pair  # noqa: E402
from hybrid import hybrid_forward  # noqa: E402

__all__ = ["load_hybrid_pair"]


def load_hybrid_pair(name: str) -> Pair:
    """Read the hybrid target and its draft of a name (``draft``, ``dflash2``), in float32."""
    return replace(load_pair(HERE, torch.device("cpu"), name), run=hybrid_forward)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draft", default="draft", help="draft or dflash2")
    parser.add_argument("--per-kind", type=int, default=100)
    parser.add_argument("--chains", type=int, default=25)
    args = parser.parse_args()
    pair = load_hybrid_pair(args.draft)
    print(json.dumps(evaluate(pair, args.per_kind, args.chains), indent=2))


if __name__ == "__main__":
    main()
