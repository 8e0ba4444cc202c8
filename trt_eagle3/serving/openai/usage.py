"""Count tokens in OpenAI's ``usage`` object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trt_eagle3.decode.request.request import Generation

__all__ = ["acceptance_length", "usage"]


def usage(
    generations: Sequence[Generation], *, prompts: int = 1, reasoning_tokens: int = 0
) -> dict[str, Any]:
    """Build ``usage`` of a call; ``acceptance_length`` and the timings are our own fields.

    ``time_to_first_token_ms`` and ``tokens_per_second`` are ``Generation``'s; None for a call with
    several answers.

    Args:
        prompts: number of different prompts. Answers to the same prompt are adjacent, and its
            tokens count once.
        reasoning_tokens: the answers' tokens that are reasoning.
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
    """Return the mean tokens emitted per target forward that verified drafts; None without one.

    The mean is over all answers.
    """
    lengths = [length for generation in generations for length in generation.accepted_lengths]
    return sum(lengths) / len(lengths) if lengths else None
