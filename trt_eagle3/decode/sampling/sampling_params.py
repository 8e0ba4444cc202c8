"""SamplingParams: how the tokens of an answer are sampled, and when it ends."""

from __future__ import annotations

import difflib
import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypedDict, Unpack

from trt_eagle3.decode.sampling.grammar import Grammar, is_model_class
from trt_eagle3.errors import UserError, clip
from trt_eagle3.io.vllm_names import called_in_python

__all__ = ["GREEDY", "MAX_LOGPROBS", "SamplingOptions", "SamplingParams", "check_options"]

MAX_LOGPROBS = 20
"""Most of the likeliest tokens whose log-probabilities a request can get."""
_LEAST_TOP_P = 1e-9  # replaces 0, which OpenAI's clients may send; keeps only the likeliest token
_GRAMMAR_HINT = " vLLM's name; here it is called grammar, such as Grammar.json_schema(schema)."
_HINTS = {
    "n": " Give it to generate or chat, beside the sampling parameters.",
    "structured_outputs": _GRAMMAR_HINT,
    "guided_decoding": _GRAMMAR_HINT,
}
MAX_BIASES = 1024
"""Most tokens in a request's ``logit_bias``."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling options of a request, and when its answer ends. Greedy by default.

    Order: ``logit_bias``, penalties, tokens forbidden by grammar and ``min_tokens``, then the
    filters in the order of the fields.

    Attributes:
        temperature: divides the logits; 0 is greedy.
        top_k: keep tokens whose probability reaches the k-th largest; 0 keeps all.
        top_p: of those, keep the likeliest tokens whose total probability reaches this; 0 keeps
            only the likeliest.
        min_p: of those, keep tokens of at least this share of the largest probability.
        repetition_penalty: logits of tokens in prompt or answer are divided by it if positive,
            multiplied if negative (CTRL, arXiv 1909.05858); 1 is none.
        presence_penalty: subtracted from the logits of tokens in the answer.
        frequency_penalty: subtracted once per occurrence of a token in the answer.
        logit_bias: added to the logits of tokens, by token id.
        seed: of this request's own random numbers; None: a random seed.
        max_tokens: most new tokens.
        min_tokens: the first ``min_tokens`` tokens do not end the answer, unless the grammar
            requires an end.
        stop: one text or several that end the answer; the answer does not include them.
        stop_token_ids: tokens that end the answer, in addition to the model's own. The answer
            includes them.
        ignore_eos: continue past the model's end tokens; with a grammar, while it allows any other
            token.
        grammar: the form of the answer; a Pydantic model class stands for its JSON Schema. The
            answer is complete unless ``finish_reason`` is ``length``, or a stop text or stop token
            cut it.
        logprobs: return the log-probability of every token, and of this many of the likeliest.
            They are of the target's raw distribution: before bias, penalties, grammar, temperature
            and filters. 0: of the emitted token only; None: none.
        prompt_logprobs: return the same for the tokens of the prompt, but the first. Their
            prefill reuses no cached prefix, and is slower; None: none.
    Raises:
        UserError: a value is outside its range or of another type, or a field is unknown; names
            the field.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    max_tokens: int = 256
    min_tokens: int = 0
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __new__(cls, *_: Any, **options: Any) -> Self:
        """Refuse unknown fields with a UserError; ``__init__`` alone would raise TypeError."""
        check_options(options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_whole("top_k", self.top_k, 0, 2**31 - 1)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            object.__setattr__(self, "top_p", _LEAST_TOP_P)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _check_number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.seed is not None:
            _check_whole("seed", self.seed, 0, 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        if is_model_class(self.grammar):
            object.__setattr__(self, "grammar", Grammar.json_schema(self.grammar, "grammar"))
        if not isinstance(self.grammar, Grammar | None):
            raise UserError(
                f"grammar: expected a Grammar, got {type(self.grammar).__name__}. "
                "For a JSON Schema: Grammar.json_schema(schema)."
            )
        self._check_end()

    def _check_end(self) -> None:
        """Check the fields that end the answer."""
        if not _is_whole(self.max_tokens) or self.max_tokens < 1:
            raise UserError(
                f"max_tokens: expected a whole number of at least 1, got {self.max_tokens!r:.40}"
            )
        _check_whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        if not all(isinstance(text, str) and text for text in self.stop):
            raise UserError(
                f"stop: expected a list of texts that are not empty, got {list(self.stop)!r:.80}"
            )
        if not all(_is_whole(token) for token in self.stop_token_ids):
            raise UserError(
                "stop_token_ids: expected a list of token ids, got "
                f"{list(self.stop_token_ids)!r:.80}"
            )
        if not isinstance(self.ignore_eos, bool):
            raise UserError(f"ignore_eos: expected true or false, got {self.ignore_eos!r:.40}")

    def updated(self, **options: Unpack[SamplingOptions]) -> SamplingParams:
        """Return a copy with some fields changed.

        Raises:
            UserError: as for the constructor, or the field does not exist.
        """
        check_options(options)
        given: dict[str, Any] = dict(options)
        return replace(self, **given)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.temperature == 0.0

    @property
    def filters(self) -> tuple[float, int, float, float]:
        """Temperature and filters. Sequences with equal values are verified in one batch."""
        return self.temperature, self.top_k, self.top_p, self.min_p

    @property
    def penalised(self) -> bool:
        """Whether any penalty depends on earlier tokens."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def changes_logits(self) -> bool:
        """Whether the emitted token may differ from the likeliest of the target's raw logits."""
        return (
            self.penalised
            or bool(self.logit_bias)
            or self.min_tokens > 0
            or self.grammar is not None
        )


# ``help`` and editors show the fields, not the parameters of ``__new__``
functools.update_wrapper(SamplingParams.__new__, SamplingParams.__init__, assigned=())


class SamplingOptions(TypedDict, total=False):
    """Fields of ``SamplingParams`` as keywords."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    max_tokens: int
    min_tokens: int
    stop: Sequence[str] | str
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    grammar: Grammar | type[Any] | None
    logprobs: int | None
    prompt_logprobs: int | None


def check_options(options: Mapping[str, object], others: Sequence[str] = ()) -> None:
    """Refuse names that are no fields of ``SamplingParams``.

    Args:
        others: further names that the message may suggest.
    Raises:
        UserError: an unknown name, with the nearest known one.
    """
    fields = tuple(SamplingParams.__dataclass_fields__)
    for name in options:
        if name not in fields:
            known = (*others, *fields)
            near = difflib.get_close_matches(name[:40].lower(), known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            if ours := called_in_python(name):
                hint = f" In vLLM an argument of LLM; {ours}."
            hint = _HINTS.get(name, hint)
            raise UserError(f"{clip(name, 40)}: unknown option.{hint} Options: {', '.join(known)}")


def _as_tuple(name: str, value: object) -> tuple[object, ...]:
    """Convert a list or tuple to a tuple; None becomes an empty one.

    Raises:
        UserError: anything else, such as a single value in place of a list.
    """
    if not isinstance(value, list | tuple | types.NoneType):
        raise UserError(f"{name}: expected a list, got {type(value).__name__}. Put it in a list.")
    return tuple(value or ())


def _biases(value: object) -> Mapping[int, float]:
    """Check ``logit_bias``, and return a private copy."""
    if not isinstance(value, Mapping):
        raise UserError(f"logit_bias: expected token ids with numbers, got {type(value).__name__}")
    if len(value) > MAX_BIASES:
        raise UserError(f"logit_bias: {len(value)} tokens, expected at most {MAX_BIASES}")
    for token, bias in value.items():
        _check_whole("logit_bias", token, 0, 2**31 - 1)
        _check_number(f"logit_bias[{token}]", bias, -100.0, 100.0)
    return {int(token): float(bias) for token, bias in value.items()}


def _check_number(name: str, value: object, low: float, high: float) -> None:
    in_range = (
        isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    )
    if not in_range:
        raise UserError(f"{name}: expected a number from {low:g} to {high:g}, got {_shown(value)}")


def _check_whole(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise UserError(
            f"{name}: expected a whole number from {low} to {high}, got {_shown(value)}"
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """Show a value of any type in one line."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    return f"{' '.join(repr(value).split()):.40}"


GREEDY = SamplingParams()
