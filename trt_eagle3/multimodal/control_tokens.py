"""Encode prompts so that control tokens in message texts stay text.

A template renders messages and control tokens into one string. In that string, a ``<|im_start|>``
from a message equals one from the template. So every control token in a message, or fragment of
one, is rendered as an unguessable placeholder. A prompt with placeholders is encoded by a second
tokenizer. It knows each control token only under another name, and splits the original names like
any text (``split_special_tokens`` of transformers and vLLM).
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.caller import NO_CALLER, Caller
from trt_eagle3.multimodal.text_encoder import TextEncoder

__all__ = ["ControlTokens"]

_MAX_COUNT = 1 << 14  # control tokens; models in use have up to 6,500
_MAX_LEN = 256  # characters of a control token
_INDEX = 8  # hexadecimal digits after the nonce of a placeholder


class ControlTokens:
    """The control tokens of a tokenizer: its special tokens, and ``others``."""

    def __init__(self, tokenizer: Tokenizer, others: Iterable[str] = ()) -> None:
        special = [
            token for token in tokenizer.get_added_tokens_decoder().values() if token.special
        ]
        # longest first, as the tokenizer matches them
        self.tokens = sorted(
            {*others, *(token.content for token in special)} - {""}, key=len, reverse=True
        )
        self._tokenizer = tokenizer
        self.encoder = TextEncoder.of(tokenizer)
        # Tokens that are matched after normalisation may appear in a text that did not contain
        # them before.
        self._always = any(token.normalized for token in special)
        self._nonce = secrets.token_hex(16)
        self._longest = max(map(len, self.tokens), default=0)
        if self._longest > _MAX_LEN or len(self.tokens) > _MAX_COUNT:
            raise UserError(
                f"tokenizer: {len(self.tokens)} control tokens of up to {self._longest} "
                f"characters, expected at most {_MAX_COUNT} of {_MAX_LEN}. Is it the right file?"
            )
        matched = any_of(self.tokens)
        self._find = re.compile(matched)
        if words := {token.content for token in special if token.single_word}:
            matched = "|".join(
                rf"(?<!\w){re.escape(t)}(?!\w)" if t in words else re.escape(t) for t in self.tokens
            )
        self._find_all = re.compile(f"{self._nonce}([0-9a-f]{{{_INDEX}}})|{matched}")
        self._heads = frozenset(
            token[:size] for token in self.tokens for size in range(1, len(token))
        )
        self._tails = frozenset(
            token[size:] for token in self.tokens for size in range(1, len(token))
        )
        self._lock = threading.Lock()

    def warm_up(self) -> None:
        """Load both tokenizers in the encoding processes before the first text arrives.

        Raises:
            UserError, EnvironmentMissingError: as for ``TextEncoder.encode``.
        """
        self.encoder.warm_up()
        with self._lock:
            splitting = self._splitting[0]
        splitting.warm_up()

    def protect(self, value: Any, literals: list[str]) -> Any:
        """Replace control tokens and their fragments by placeholders, in all texts and field names.

        Args:
            value: messages, or any nesting of mappings, lists and texts.
            literals: receives the text that each placeholder stands for.
        Raises:
            UserError: a text is not Unicode, or ``value`` is nested too deep.
        """
        try:
            return self._protect(value, literals)
        except RecursionError as error:
            raise UserError("messages: nested too deep. Send plain messages.") from error

    def encode(
        self,
        rendered: str,
        literals: Sequence[str] = (),
        caller: Caller = NO_CALLER,
        *,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Encode a prompt to token ids. Its placeholders become ``literals``, encoded as text.

        Args:
            add_special_tokens: let the tokenizer add its own tokens around the prompt (BOS).
        Raises:
            UserError, RequestCancelledError, EnvironmentMissingError: as for
                ``TextEncoder.encode``.
        """
        if not literals and not self._always:
            return self.encoder.encode(rendered, caller, add_special_tokens=add_special_tokens)
        with self._lock:
            splitting, names, ids = self._splitting

        def name_or_text(found: re.Match[str]) -> str:
            index: str | None = found[1]
            return names[found[0]] if index is None else literals[int(index, 16)]

        text = self._find_all.sub(name_or_text, rendered)
        found = splitting.encode(text, caller, add_special_tokens=add_special_tokens)
        return [ids.get(i, i) for i in found]

    def _protect(self, value: Any, literals: list[str]) -> Any:
        match value:
            case str():
                return self._protect_text(value, literals)
            case Mapping():
                return {
                    self._protect(k, literals): self._protect(v, literals) for k, v in value.items()
                }
            case list() | tuple():
                return [self._protect(item, literals) for item in value]
            case _:
                return value

    def _protect_text(self, text: str, literals: list[str]) -> str:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"text: not Unicode text at character {error.start}. Pass it as UTF-8."
            ) from error
        if self._nonce in text:
            raise UserError("text: holds a mark of this program's own. Remove it.")
        parts, end = [], 0
        for start, stop in self._spans(text):
            parts += [text[end:start], f"{self._nonce}{len(literals):0{_INDEX}x}"]
            literals.append(text[start:stop])
            end = stop
        return "".join([*parts, text[end:]]) if parts else text

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Find the control tokens in ``text``, and token fragments at its ends.

        A fragment at an end may form a token with the neighbouring text. Templates join texts and
        strip their spaces, so fragments are searched without leading and trailing spaces.
        """
        spans = [found.span() for found in self._find.finditer(text)]
        first, last = len(text) - len(text.lstrip()), len(text.rstrip())
        sizes = range(self._longest - 1, 0, -1)
        tail = next((n for n in sizes if text[first : first + n] in self._tails), 0)
        head = next((n for n in sizes if n <= last and text[last - n : last] in self._heads), 0)
        ends = [(first, first + tail)] * bool(tail) + [(last - head, last)] * bool(head)
        return _merged([*spans, *ends])

    @cached_property
    def _splitting(self) -> tuple[TextEncoder, dict[str, str], dict[int, int]]:
        """The tokenizer that splits control tokens, their names in it, and a map of token ids.

        The map takes the id of each name to the id of the original token.
        """
        source = json.loads(self._tokenizer.to_str())
        added = {token["content"]: token for token in source["added_tokens"]}
        for content in self.tokens:
            if content in added:
                added[content]["special"] = True
        names = {content: f"<|{self._nonce}{i:x}|>" for i, content in enumerate(self.tokens)}
        flags = [
            {flag: added.get(content, {}).get(flag, False) for flag in _FLAGS}
            for content in self.tokens
        ]
        text = json.dumps(source)
        splitting = TextEncoder(
            lambda: text,
            list(zip(names.values(), flags, strict=True)),
            encode_special_tokens=True,
        )
        originals = [_id(self._tokenizer, token) for token in self.tokens]
        return splitting, names, dict(zip(splitting.added_ids, originals, strict=True))


def any_of(texts: Sequence[str]) -> str:
    """Build a regular expression that matches any of ``texts``, the longest first.

    Common prefixes are compared once, so search time hardly grows with the number of texts.

    Args:
        texts: distinct and non-empty.
    """
    if not texts:
        return "(?!)"
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(text[0], []).append(text)
    return "|".join(map(_of_group, groups.values()))


def _of_group(texts: list[str]) -> str:
    """Build the expression for texts that begin with the same character."""
    first, last = min(texts), max(texts)
    pairs = enumerate(zip(first, last, strict=False))
    head = first[: next((i for i, (a, b) in pairs if a != b), len(first))]
    rests = [text[len(head) :] for text in texts if text != head]
    if not rests:
        return re.escape(head)
    return f"{re.escape(head)}(?:{any_of(rests)}){'?' if head in texts else ''}"


_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def _id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None, f"{token}: no token of this tokenizer"
    return found


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sort ``spans`` and merge those that overlap."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found
