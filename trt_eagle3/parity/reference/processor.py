"""The prompt as ``transformers`` prepares it, for the target's family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import transformers
from torch import Tensor

from trt_eagle3.errors import EnvironmentMissingError
from trt_eagle3.prompts.prompt_file import Question

__all__ = ["ProcessorReference", "ReferenceInputs", "check_transformers", "decoded_text"]


@dataclass(frozen=True)
class ReferenceInputs:
    """One prompt as transformers prepares it.

    As ``ModelInputs``, with ``patches`` float32 [N, D]; N = 0 for text.
    """

    token_ids: Tensor
    position_ids: Tensor
    rope_delta: int
    patches: Tensor
    grid_thw: Tensor
    visual_rows: Tensor


class ProcessorReference(Protocol):
    """The processor of a checkpoint."""

    def __call__(self, question: Question, /) -> ReferenceInputs | None:
        """Return the inputs of ``question``; None if transformers alone cannot prepare it."""
        ...

    def text(self, token_ids: Sequence[int], /) -> str:
        """Decode the tokens of an answer with ``transformers``, without special tokens."""
        ...


def decoded_text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Decode an answer's tokens with a transformers tokenizer, without special tokens."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


def check_transformers() -> None:
    """Reject a ``transformers`` older than the one that the references were written for.

    Raises:
        EnvironmentMissingError: it is older.
    """
    if not hasattr(transformers, "Qwen2VLImageProcessorPil"):
        raise EnvironmentMissingError(
            f"validate needs transformers >= 5.10, found {transformers.__version__}: pip "
            "install -U transformers"
        )
