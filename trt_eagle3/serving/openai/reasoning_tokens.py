"""How many of an answer's tokens are reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from trt_eagle3.multimodal import Processor
from trt_eagle3.multimodal.reasoning import Reasoning

__all__ = ["count_reasoning_tokens"]


def count_reasoning_tokens(
    processor: Processor, form: Reasoning, token_ids: Sequence[int], reasoning: str
) -> int:
    """The emitted ids that wrote an answer's reasoning and the blanks around it, its marks left
    out.

    An id that wrote an end of the reasoning and a part of a mark counts. Where nothing closes the
    reasoning, every id behind its first mark counts, the end token included.

    Args:
        form: how the answer begins. token_ids: of the whole answer.
        reasoning: as the answer's parser found it, without blanks around it.
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
    if end == len(text):  # it was never closed: ids without text are part of it too
        end += 1
    count = start = 0
    for piece in pieces:
        stop = start + len(piece)
        # an id without text is a part of the next character
        count += start < end and (stop > begin or start == stop == begin)
        start = stop
    return count


def _num_blanks(text: str) -> int:
    return len(text) - len(text.lstrip())
