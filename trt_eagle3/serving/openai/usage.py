"""Counts of tokens as OpenAI's object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trt_eagle3.decode.request.request import Generation

__all__ = ["acceptance_length", "usage"]


def usage(
    generations: Sequence[Generation], *, prompts: int = 1, reasoning_tokens: int = 0
) -> dict[str, Any]:
    """``usage`` of a call; ``acceptance_length`` and the timings are ours.

    ``time_to_first_token_ms`` and ``tokens_per_second`` are ``Generation``'s; None of a call with
    several answers.

    Args:
        prompts: different ones; the answers to a prompt stand together, and share its tokens.
        reasoning_tokens: of the answers' tokens, those of their reasoning.
    """
    per_prompt = len(generations) // prompts
    firsts = generations[::per_prompt]
    prompt = sum(generation.prompt_tokens for generation in firsts)
    reused = sum(generation.reused_tokens for generation in firsts)
    completion = sum(len(generation.token_ids) for generation in generations)
    only = generations[0] if len(generations) == 1 else None
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": reused},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "acceptance_length": acceptance_length(generations),
        "time_to_first_token_ms": only and only.time_to_first_token_ms,
        "tokens_per_second": only and only.tokens_per_second,
    }


def acceptance_length(generations: Sequence[Generation]) -> float | None:
    """Mean tokens emitted per target forward that verified drafts, over all answers; None where
    none did.
    """
    lengths = [length for generation in generations for length in generation.accepted_lengths]
    return sum(lengths) / len(lengths) if lengths else None
