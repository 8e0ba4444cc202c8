"""Compare the converted checkpoint with llama.cpp on the GGUF file.

    python examples/smollm2/check.py engines/smollm2/target

llama.cpp is not needed: ``llama_cpp.json`` holds what it computed (``record_llama_cpp.py``). The
token ids of 200 texts must be equal, and the log probabilities of the next tokens behind 20 prompts
within ``TOLERANCE``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from transformers.utils import logging

HERE = Path(__file__).parent
TOLERANCE = 0.02
"""llama.cpp's KV cache is float16; its weights here are float32."""


def different_texts(folder: Path, record: list[dict]) -> list[str]:
    """Return the texts whose ids differ from llama.cpp's."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [
        entry["text"] for entry in record if tokenizer.encode(entry["text"]).ids != entry["ids"]
    ]


@torch.inference_mode()
def largest_difference(folder: Path, record: list[dict]) -> float:
    """Return the largest difference of a log probability from llama.cpp's."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    worst = 0.0
    for entry in record:
        logits = model(torch.tensor([entry["ids"]]), logits_to_keep=1).logits[0, -1]
        ours = logits.log_softmax(-1)
        worst = max(worst, *(abs(float(ours[id]) - theirs) for id, theirs in entry["top"]))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, help="the converted checkpoint")
    args = parser.parse_args()
    logging.disable_progress_bar()
    record = json.loads((HERE / "llama_cpp.json").read_text(encoding="utf-8"))
    different = different_texts(args.folder, record["tokens"])
    worst = largest_difference(args.folder, record["next"])
    print(
        f"token ids: {len(record['tokens']) - len(different)} of {len(record['tokens'])} texts "
        f"equal llama.cpp's"
    )
    print(f"log probabilities behind {len(record['next'])} prompts: within {worst:.2g}")
    if different or not worst <= TOLERANCE:
        raise SystemExit(
            f"the checkpoint differs from llama.cpp (allowed: {TOLERANCE}): {different[:3]}"
        )


if __name__ == "__main__":
    main()
