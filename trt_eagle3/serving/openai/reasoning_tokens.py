"""Count the reasoning tokens of an answer."""

from __future__ import annotations

from collections.abc import Sequence

from trt_eagle3.multimodal import Processor
from trt_eagle3.multimodal.reasoning import Reasoning

__all__ = ["count_reasoning_tokens"]


def count_reasoning_tokens(
    processor: Processor, form: Reasoning, token_ids: Sequence[int], reasoning: str
) -> int:
    """Count the ids whose text is reasoning or the blanks around it, without the marks.

    An id counts if only part of its text is reasoning. If no mark closes the reasoning, all ids
    after the opening mark count, the end token included.

    Args:
        form: how the answer begins.
        token_ids: of the whole answer.
        reasoning: the text that the answer's parser found, stripped.
    """
    if not reasoning:
        return 0
    decoder = processor.stream_decoder()
    pieces = [decoder.push(token_id) for token_id in token_ids]
    text = "".join(pieces) + decoder.flush()
    begin = 0
    if form.mode == "optional":
        begin = _num_blanks(text) + len(form.start)
    end = begin + _num_blanks(text[begin:]) + len(reasoning)
    end += _num_blanks(text[end:])
    if end == len(text):  # never closed: ids without text count too
        end += 1
    count = start = 0
    for piece in pieces:
        stop = start + len(piece)
        # an id without text is part of the next character
        count += start < end and (stop > begin or start == stop == begin)
        start = stop
    return count


def _num_blanks(text: str) -> int:
    return len(text) - len(text.lstrip())
