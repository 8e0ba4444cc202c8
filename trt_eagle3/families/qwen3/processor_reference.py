"""Prepare text prompts with ``transformers``: tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from trt_eagle3.parity.reference.processor import (
    ReferenceInputs,
    check_transformers,
    decoded_text,
)
from trt_eagle3.prompts.prompt_file import Question

__all__ = ["Qwen3ProcessorReference"]


class Qwen3ProcessorReference:
    """Implements ``parity.processor.ProcessorReference`` for a text-only checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        check_transformers()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(checkpoint), local_files_only=True
        )

    def __call__(self, question: Question) -> ReferenceInputs:
        """Return token ids, and positions 0, 1, 2, ..."""
        messages = [{"role": "user", "content": question.prompt}]
        made = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
        token_ids = torch.tensor(made["input_ids"])
        return ReferenceInputs(
            token_ids=token_ids,
            position_ids=torch.arange(len(token_ids), dtype=torch.int32).repeat(3, 1),
            rope_delta=0,
            patches=torch.empty(0, 0),
            grid_thw=torch.empty(0, 3, dtype=torch.int64),
            visual_rows=torch.zeros_like(token_ids, dtype=torch.bool),
        )

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode the tokens of an answer with ``transformers``, without special tokens."""
        return decoded_text(self._tokenizer, token_ids)
