"""From a request's grammar to a matcher: tried in a process of its own, compiled, kept for the next
request.
"""

from __future__ import annotations

import json
import signal
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from trt_eagle3.decode import grammar_worker
from trt_eagle3.decode.filter_trial import FilterTrial
from trt_eagle3.decode.grammar import Grammar
from trt_eagle3.decode.grammar_state import GrammarState
from trt_eagle3.decode.grammar_text import grammar_text
from trt_eagle3.errors import OverloadedError, UserError, clip
from trt_eagle3.io.worker_process import WorkerProcess

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

__all__ = ["GrammarCompiler"]

_KEPT = 64  # compiled grammars, and refusals; each has some hundred KiB


@dataclass(frozen=True)
class _Compiled:
    """A grammar at its beginning, and what its answers find out."""

    matcher: LLMatcher
    trial: FilterTrial = field(default_factory=FilterTrial)


class GrammarCompiler:
    """Makes matchers over one vocabulary; thread-safe. Nothing runs until the first grammar
    comes, or ``warm_up``.

    A grammar is compiled in some milliseconds. One that takes more time or memory than
    ``grammar_worker`` allows is refused within a second, and delays nobody else's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]) -> None:
        """``vocab_size``: of the target's logits. ``end_ids``: the model's end tokens."""
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = tuple(end_ids)
        self._worker = WorkerProcess(grammar_worker.__file__, "grammar", self._preface)
        self._known: OrderedDict[tuple[str, str, str], _Compiled | str] = OrderedDict()
        self._lock = threading.Lock()

    def state(
        self, grammar: Grammar, *, min_tokens: int = 0, ignore_eos: bool = False
    ) -> GrammarState:
        """``grammar`` at its beginning.

        Raises:
            UserError: it is none, allows nothing, or takes too much time or memory; by its field.
            OverloadedError: it could not be tried now; it may well be sound.
            EnvironmentMissingError: llguidance is not installed, or no process can be started.
        """
        made = self._made(grammar)
        if isinstance(made, str):
            raise UserError(f"{grammar.field}: {made}")
        return GrammarState(
            made.matcher.deep_copy(),
            self._end_ids,
            self._vocab_size,
            min_tokens=min_tokens,
            ignore_eos=ignore_eos,
            trial=made.trial,
        )

    def warm_up(self) -> None:
        """Read the vocabulary and start the process now, rather than with the first grammar."""
        self.state(Grammar.json_object())

    def close(self) -> None:
        """End the process."""
        self._worker.close()

    def _made(self, grammar: Grammar) -> _Compiled | str:
        """The compiled grammar, or why it is refused."""
        key = grammar.kind, grammar.source, grammar.after
        with self._lock:
            if (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                return known
        text = grammar_text(grammar)
        made = self._refusal(text) or self._compiled(text)
        with self._lock:
            self._known[key] = made
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return made

    def _refusal(self, text: str) -> str:
        """Why the worker thinks that ``text`` is no grammar for us; empty where it is one."""
        answer = self._worker.ask(json.dumps({"grammar": text}).encode())
        if answer is None:
            raise OverloadedError("The process that tries grammars ended. Try again.")
        if answer.get("ended") == signal.SIGALRM:
            raise OverloadedError(
                f"This machine had no time to try the grammar in {grammar_worker.WALL_S:g} s. "
                "Try again."
            )
        if "ended" in answer:
            return (
                f"takes more than {grammar_worker.CPU_S:g} s or "
                f"{grammar_worker.MEMORY_BYTES >> 20} MiB to compile. Simplify it."
            )
        if "slow" in answer:
            return f"takes {answer['slow']:.2f} s for a token. Simplify it."
        return _reason(answer["error"]) if "error" in answer else ""

    def _compiled(self, text: str) -> _Compiled | str:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**grammar_worker.LIMITS)
        made = LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        return _reason(made.get_error()) if made.is_error() else _Compiled(made)

    @cached_property
    def _vocabulary(self) -> str:
        return self._source.to_str()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        ends = self._grammar_ends
        return LLTokenizer(self._vocabulary, n_vocab=self._vocab_size, eos_token=ends)

    @property
    def _grammar_ends(self) -> list[int] | None:
        """Tokens that end a grammar's text; None: the tokenizer's own, as no config names one."""
        return list(self._end_ids) or None

    def _preface(self) -> bytes:
        fields = {
            "tokenizer": self._vocabulary,
            "size": self._vocab_size,
            "ends": self._grammar_ends,
        }
        return json.dumps(fields).encode()


def _reason(message: str) -> str:
    """llguidance's message as one line: of a bad pattern what is wrong with it, without the drawing
    of where.
    """
    _, pattern, rest = message.partition("regex parse error:")
    wrong = rest.partition("error: ")[2].partition("\n")[0]
    if pattern and wrong:
        return f"no regular expression: {clip(wrong)}"
    return clip(" ".join(message.replace("<non-verbose/>", "").split()))
