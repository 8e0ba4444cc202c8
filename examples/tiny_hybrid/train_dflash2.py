"""Train the DFlash2 draft of the tiny hybrid, in z-lab's layout. It begins with the DFlash draft of
the dense pair; convolutions and selector are new.

    python examples/tiny_hybrid/train_dflash2.py --output examples/tiny_hybrid

One CPU thread, minutes (``dflash2_metrics.json``). Batches and losses are those of
``examples/tiny/train_block.py``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tiny"))

from block import BlockShape  # noqa: E402
from export import rounded, save_dflash  # noqa: E402
from hybrid import AUX_LAYERS, hybrid_forward  # noqa: E402
from prompt import train_bpe  # noqa: E402
from train_block import (  # noqa: E402
    MASK_ID,
    begun,
    block_parser,
    fit_block,
    measured,
    read_target,
    task_states,
    write_figures,
)

SHAPE = BlockShape(
    AUX_LAYERS,
    8,
    own_position=True,
    windows=(32, 32, 0),
    mask_id=MASK_ID,
    conv_kernel=2,
    conv_group=16,
    selector_rank=32,
    selector_top_k=16,
)


def main() -> None:
    parser = block_parser(__doc__, seed=6)
    parser.set_defaults(begin=HERE.parent / "tiny/dflash")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer, target = train_bpe(0), read_target(args.output / "target")
    stored = task_states(target, tokenizer, args, AUX_LAYERS, hybrid_forward)
    start = time.time()
    torch.manual_seed(args.seed)
    draft = begun(SHAPE, target, args.begin)
    fit_block(draft, target, stored, args)
    seconds = time.time() - start
    rounded(draft)
    save_dflash(args.output / "dflash2", draft, target)
    figures = measured(draft, target, tokenizer, args, hybrid_forward)
    write_figures(args, "dflash2", seconds, figures)


if __name__ == "__main__":
    main()
