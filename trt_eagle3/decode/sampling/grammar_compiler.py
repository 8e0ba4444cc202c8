"""GrammarCompiler: make a matcher of a request's grammar.

A grammar is first tried in a separate process, then compiled, and cached for later requests.
"""

from __future__ import annotations

import json
import signal
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

from trt_eagle3.decode.sampling import grammar_worker
from trt_eagle3.decode.sampling.filter_trial import FilterTrial
from trt_eagle3.decode.sampling.grammar import Grammar
from trt_eagle3.decode.sampling.grammar_state import GrammarState
from trt_eagle3.errors import OverloadedError, UserError, clip
from trt_eagle3.io.worker_process import WorkerProcess
from trt_eagle3.multimodal.caller import NO_CALLER, Caller
from trt_eagle3.multimodal.fair_turns import FairTurns

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

__all__ = ["GrammarCompiler"]

_T = TypeVar("_T")
_KEPT = 64  # cached grammars, some hundred KiB each, and as many refusals
_REASON_LEN = 300  # characters
_SCHEMA_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_INVALID_TYPE = (
    "Invalid type: "  # how llguidance's message on an unknown type of JSON Schema begins
)


@dataclass(frozen=True)
class _Compiled:
    """A grammar in its start state, and its filter trial."""

    matcher: LLMatcher
    trial: FilterTrial = field(default_factory=FilterTrial)


class GrammarCompiler:
    """Makes matchers over one vocabulary; thread-safe.

    The process starts with the first grammar, or with ``warm_up``. A grammar compiles in some
    milliseconds. If it needs more time or memory than ``grammar_worker`` allows, it is refused
    within a second. Cached grammars need no wait. Others are tried one at a time, in fair turns
    among clients.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]) -> None:
        """Create a compiler.

        ``vocab_size``: of the target's logits. ``end_ids``: the model's end tokens.
        """
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = tuple(end_ids)
        self._worker = WorkerProcess(grammar_worker.__file__, "grammar", self._preface)
        self._turns = FairTurns(1)
        self._compiled_by_key = _Recent[_Compiled]()
        self._refusals_by_key = _Recent[str]()  # separate: bad grammars must not evict good ones

    def knows(self, grammar: Grammar) -> bool:
        """Return whether ``grammar`` is cached, so that ``state`` returns at once."""
        return self._known(grammar) is not None

    def state(
        self,
        grammar: Grammar,
        caller: Caller = NO_CALLER,
        *,
        min_tokens: int = 0,
        ignore_eos: bool = False,
    ) -> GrammarState:
        """Return ``grammar`` in its start state.

        Raises:
            UserError: it is invalid, allows nothing, or takes too much time or memory; names the
                field.
            OverloadedError: it could not be tried now; it may be valid.
            RequestCancelledError: ``caller`` left.
            EnvironmentMissingError: llguidance is not installed, or no process can be started.
        """
        made = self._known(grammar)
        if made is None:
            with self._turns.turn(caller):
                # another request may have compiled it meanwhile
                made = self._known(grammar) or self._made(grammar, caller)
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
        """Read the vocabulary and start the process now, not with the first grammar."""
        self.state(Grammar.json_object())

    def close(self) -> None:
        """End the process."""
        self._worker.close()

    def _known(self, grammar: Grammar) -> _Compiled | str | None:
        """Return the compiled grammar, or why it is refused; None if neither is cached."""
        key = _key(grammar)
        return self._compiled_by_key.get(key) or self._refusals_by_key.get(key)

    def _made(self, grammar: Grammar, caller: Caller) -> _Compiled | str:
        """Try a grammar now and cache the result."""
        made = self._tried(grammar, caller)
        if isinstance(made, str):
            self._refusals_by_key.put(_key(grammar), made)
        else:
            self._compiled_by_key.put(_key(grammar), made)
        return made

    def _tried(self, grammar: Grammar, caller: Caller) -> _Compiled | str:
        """Compile ``grammar`` if the worker accepts it; else return why it is refused."""
        fields = {"kind": grammar.kind, "source": grammar.source, "after": grammar.after}
        answer = self._worker.ask(json.dumps(fields).encode(), caller.cancelled)
        if answer is None:
            raise OverloadedError("grammar: the process that tries grammars ended. Try again.")
        if answer.get("ended") == signal.SIGALRM:
            raise OverloadedError(
                f"grammar: this machine had no time to try it in {grammar_worker.WALL_S:g} s. "
                "Try again."
            )
        if "ended" in answer:
            return (
                f"takes more than {grammar_worker.CPU_S:g} s or "
                f"{grammar_worker.MEMORY_BYTES >> 20} MiB to compile. Simplify it."
            )
        if "slow" in answer:
            return f"takes {answer['slow']:.2f} s for a token. Simplify it."
        return _reason(answer["error"]) if "error" in answer else self._compiled(answer["text"])

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
        """Tokens that end a grammar's text; None: the tokenizer's own, as the config names none."""
        return list(self._end_ids) or None

    def _preface(self) -> bytes:
        fields = {
            "tokenizer": self._vocabulary,
            "size": self._vocab_size,
            "ends": self._grammar_ends,
        }
        return json.dumps(fields).encode()


_Key = tuple[str, str, str]


def _key(grammar: Grammar) -> _Key:
    return grammar.kind, grammar.source, grammar.after


class _Recent(Generic[_T]):
    """A cache of the most recently used values; thread-safe."""

    def __init__(self) -> None:
        self._values: OrderedDict[_Key, _T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: _Key) -> _T | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: _Key, value: _T) -> None:
        with self._lock:
            self._values[key] = value
            if len(self._values) > _KEPT:
                self._values.popitem(last=False)


def _reason(message: str) -> str:
    """Return llguidance's message as one line.

    Of a bad pattern's message only the error remains, without the drawing of its position. Of an
    unknown type in a JSON Schema, the known types are named.
    """
    _, pattern, rest = message.partition("regex parse error:")
    wrong = rest.partition("error: ")[2].partition("\n")[0]
    if pattern and wrong:
        return f"not a regular expression: {clip(wrong)}"
    line = " ".join(message.replace("<non-verbose/>", "").split())
    if line.startswith(_INVALID_TYPE):
        got = clip(line.removeprefix(_INVALID_TYPE), 40)
        return f"type in the JSON Schema: expected one of {', '.join(_SCHEMA_TYPES)}, got {got}"
    return clip(line, _REASON_LEN)
