"""Output: turn the tokens of a sequence into text, and detect the end of the answer."""

from __future__ import annotations

from collections.abc import Sequence

from trt_eagle3.decode.request.request import Chunk, FinishReason
from trt_eagle3.decode.sampling.logprobs import TokenLogprob
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.multimodal.tokenizer import StreamDecoder

__all__ = ["Output"]


class Output:
    """The text of one answer, built token by token.

    Text that may be the start of a stop text is held back until that is decided.
    """

    def __init__(
        self, sampling: SamplingParams, decoder: StreamDecoder, end_ids: Sequence[int]
    ) -> None:
        self._decoder = decoder
        self._stops = tuple(sampling.stop)
        self._max_tokens = sampling.max_tokens
        self._min_tokens = sampling.min_tokens
        self._grammar_ends = frozenset(() if sampling.grammar is None else end_ids)
        goes_on = sampling.ignore_eos and sampling.grammar is None
        self._ends = frozenset(sampling.stop_token_ids) | frozenset(() if goes_on else end_ids)
        self._held = ""
        self._parts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._parts)

    def take(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob] = (),
        *,
        full: bool = False,
        drafted: bool = False,
    ) -> Chunk:
        """Add one forward's tokens, cut at an end token, a stop text or the limit.

        Args:
            logprobs: of each token, if wanted.
            full: the sequence has no room for more tokens.
            drafted: the forward verified drafts.
        """
        kept: list[int] = []
        text = ""
        for token in tokens:
            kept.append(token)
            self.token_ids.append(token)
            text += self._push(token)
            if self.finish_reason is not None:
                break
        if self.finish_reason is None and full:
            text += self._end("length")
        self._parts.append(text)
        kept_logprobs = tuple(logprobs[: len(kept)])
        self.logprobs += kept_logprobs
        lengths = (len(kept),) if drafted else ()
        return Chunk(tuple(kept), text, self.finish_reason, kept_logprobs, lengths)

    def _push(self, token: int) -> str:
        """Add ``token``; returns the text that is now final."""
        self._held += self._decoder.push(token)
        if self._early(token):  # the answer cannot end here, so no text is held back
            text, self._held = self._held, ""
            return text
        if token in self._ends:
            return self._end("stop")
        found = self._cut() if self._stops else None
        if found is not None:
            return found
        if len(self.token_ids) == self._max_tokens:
            return self._end("length")
        certain = len(self._held) - self._may_stop()
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def _early(self, token: int) -> bool:
        """Return whether the answer must not end yet; an end token of a grammar always ends it."""
        return len(self.token_ids) < self._min_tokens and token not in self._grammar_ends

    def _end(self, reason: FinishReason) -> str:
        self._held += self._decoder.flush()
        found = self._cut()
        if found is not None:
            return found
        self.finish_reason = reason
        text, self._held = self._held, ""
        return text

    def _cut(self) -> str | None:
        """Return the text before the first stop text; None without a stop text."""
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if not places:
            return None
        self.finish_reason = "stop"
        text, self._held = self._held[: min(places)], ""
        return text

    def _may_stop(self) -> int:
        """Return how many characters at the end may start a stop text."""
        if not self._stops:
            return 0
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        sizes = range(min(longest, len(self._held)), 0, -1)
        return next(
            (n for n in sizes if any(stop.startswith(self._held[-n:]) for stop in self._stops)), 0
        )
