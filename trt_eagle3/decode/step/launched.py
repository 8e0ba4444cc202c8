"""A prefill that was launched, until the host reads the first tokens of prompts that end in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.step.decoder import Decoder
from trt_eagle3.decode.step.first_token import FirstTokens
from trt_eagle3.engine.memory import request_memory
from trt_eagle3.errors import DeviceMemoryError

__all__ = ["LaunchedPrefill", "launch_prefill"]

Chunk = tuple[SequenceState, int]


@dataclass
class LaunchedPrefill:
    """What is under way.

    Attributes:
        begun: those that had no token before.
        sequences: that take part. ended: those whose prompts end here.
        failed: those whose chunks memory does not hold.
    """

    begun: Sequence[SequenceState] = ()
    sequences: list[SequenceState] = field(default_factory=list)
    ended: list[SequenceState] = field(default_factory=list)
    failed: list[tuple[SequenceState, DeviceMemoryError]] = field(default_factory=list)
    _first_tokens: list[FirstTokens] = field(default_factory=list)

    def launch(
        self, decoder: Decoder, chunks: Sequence[Chunk], beside: Sequence[SequenceState] = ()
    ) -> None:
        """Run one forward over ``chunks``; where memory does not hold it, one for each: only who
        is too large fails. ``beside``: as of ``Decoder.prefill``.
        """
        rows = sum(count for _, count in chunks)
        try:
            with request_memory(
                f"prompt: {rows} tokens at once", "Rebuild with a smaller engine.prefill_chunk."
            ):
                self._first_tokens.append(decoder.prefill(chunks, beside))
        except DeviceMemoryError as error:
            if len(chunks) == 1 and not beside:
                self.failed.append((chunks[0][0], error))
                return
            for chunk in chunks:
                self.launch(decoder, [chunk])
            return
        self.sequences += [s for s, _ in chunks]
        self.ended += [s for s, _ in chunks if s.length >= s.num_prefill]

    def wait(self) -> list[SequenceState]:
        """Read the first tokens; returns the sequences that wait for theirs."""
        for tokens in self._first_tokens:
            tokens.append()
        begun = {id(s) for s in self.begun}
        return [s for s in self.ended if id(s) in begun]


def launch_prefill(
    decoder: Decoder, chunks: Sequence[Chunk], beside: Sequence[SequenceState] = ()
) -> LaunchedPrefill:
    """Launch ``chunks``: so many rows of each sequence. ``beside``: as of ``Decoder.prefill``."""
    launched = LaunchedPrefill([s for s, _ in chunks if not s.tokens])
    if chunks:
        launched.launch(decoder, chunks, beside)
    return launched
