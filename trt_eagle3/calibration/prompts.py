"""The prompts of a calibration, prepared and checked before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import family_of
from trt_eagle3.multimodal import ModelInputs
from trt_eagle3.prompts.prompt_file import Question, read_questions

__all__ = ["MAX_TOKENS", "CalibrationPrompts", "read_prompts"]

MAX_TOKENS = 16384
"""Most tokens that are used: 1 GB of hidden states and visual levels of an 8B target."""


@dataclass(frozen=True)
class CalibrationPrompts:
    """Prompts that the target runs over.

    ``given``: number of prompts in the file; prompts beyond ``MAX_TOKENS`` are skipped.
    """

    inputs: Sequence[ModelInputs]
    given: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts, including image pads."""
        return sum(len(inputs.token_ids) for inputs in self.inputs)

    @property
    def num_visual_tokens(self) -> int:
        """Visual tokens of all prompts."""
        return sum(int(inputs.visual_rows.sum()) for inputs in self.inputs)

    def __str__(self) -> str:
        """Describe the number of prompts and tokens."""
        left_out = self.given - len(self.inputs)
        more = f"; {left_out} more left out, beyond {MAX_TOKENS:,} tokens" if left_out else ""
        return f"{len(self.inputs)} prompts of {self.num_tokens:,} tokens{more}"


def read_prompts(file: Path, spec: TargetCheckpoint, max_prompt_len: int) -> CalibrationPrompts:
    """Read a prompt file (``prompts/prompt_file.py``), and every image and video that it names.

    Args:
        max_prompt_len: the longest prompt that the bundle accepts.
    Raises:
        UserError: the file is unreadable, has no prompts, or an entry that the target cannot
            process. All entries are checked, including those beyond ``MAX_TOKENS``.
    """
    questions = read_questions(file)
    processor = family_of(spec).processor(spec.path, spec, max_prompt_len=max_prompt_len)
    used: list[ModelInputs] = []
    room = MAX_TOKENS
    for index, question in enumerate(questions):
        try:
            found = processor.messages(_messages(question))
        except UserError as error:
            raise UserError(f"{file}: entry {index}: {error}") from error
        room -= len(found.token_ids)
        if room >= 0 or not used:
            used.append(found)
    return CalibrationPrompts(used, len(questions))


def _messages(question: Question) -> list[dict[str, Any]]:
    """Return the prompt, and its answer if there is one: most decoded tokens are of answers."""
    content: list[dict[str, Any]] = [{"type": "image", "image": i} for i in question.images]
    content += [{"type": "video", "video": v} for v in question.videos]
    content.append({"type": "text", "text": question.prompt})
    turns: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if question.answer is not None:
        turns.append({"role": "assistant", "content": question.answer})
    return turns
