"""TextEncoder: encode text to token ids, in bounded processes (``tokenizer_worker.py``)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from trt_eagle3.errors import UserError, clip
from trt_eagle3.io.worker_process import WorkerProcess
from trt_eagle3.multimodal import tokenizer_worker
from trt_eagle3.multimodal.caller import NO_CALLER, Caller

__all__ = ["TextEncoder", "try_tokenizer"]

_COUNT = 2  # processes: a prompt that takes a second does not block all others


class TextEncoder:
    """Encodes texts with one tokenizer, within bounds on time and memory; thread-safe."""

    def __init__(
        self,
        source: Callable[[], str],
        added: Sequence[tuple[str, Mapping[str, bool]]] = (),
        *,
        encode_special_tokens: bool = False,
    ) -> None:
        """
        Args:
            source: returns the text of ``tokenizer.json``; may be called several times.
            added: names and flags of tokens to add.
            encode_special_tokens: encode special tokens in a text as plain text (the property of
                ``tokenizers.Tokenizer``).
        """
        self._source, self._added = source, added
        self._encode_special_tokens = encode_special_tokens

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TextEncoder:
        """Create an encoder for ``tokenizer`` in its state at the first call of ``encode``."""
        return cls(tokenizer.to_str)

    def encode(
        self, text: str, caller: Caller = NO_CALLER, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Encode ``text`` to ids. The process adds about 0.1 ms.

        Raises:
            UserError: the tokenizer fails, or exceeds its time or memory.
            RequestCancelledError: ``caller`` was cancelled.
            EnvironmentMissingError: no process can be started.
        """
        fields = {"text": text, "add_special_tokens": add_special_tokens}
        ids: list[int] = self._ask(fields, caller)["ids"]
        return ids

    def warm_up(self) -> None:
        """Load the tokenizer in every process before the first text arrives.

        Raises:
            EnvironmentMissingError: no process can be started.
        """
        request = {"key": self._key, "text": "", "tokenizer": self._spec()}
        _PROCESS.ask_all(json.dumps(request).encode())

    @cached_property
    def added_ids(self) -> list[int]:
        """Ids of the tokens in ``added``.

        Raises:
            UserError, EnvironmentMissingError: as for ``encode``.
        """
        ids: list[int] = self._ask({"text": ""}, NO_CALLER)["added"]
        return ids

    @cached_property
    def _key(self) -> str:
        """SHA-256 of the tokenizer. Without ``added`` it is the worker's own default key."""
        added = json.dumps([self._added, self._encode_special_tokens]) if self._added else ""
        return hashlib.sha256((self._source() + added).encode()).hexdigest()

    def _ask(self, fields: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        request = {"key": self._key, **fields}
        answer = _asked(request, caller)
        if "unknown" in answer:
            answer = _asked({**request, "tokenizer": self._spec()}, caller)
        if "error" in answer:
            raise UserError(
                f"prompt: the checkpoint's tokenizer cannot encode it ({clip(answer['error'])}). "
                "Change the text, or use another tokenizer."
            )
        return answer

    def _spec(self) -> dict[str, Any]:
        return {
            "source": self._source(),
            "added": self._added,
            "encode_special_tokens": self._encode_special_tokens,
        }


def try_tokenizer(source: str) -> None:
    """Load the text of a ``tokenizer.json`` in an encoding process, which keeps the tokenizer.

    Raises:
        ValueError: it cannot be loaded, or exceeds its time or memory.
        EnvironmentMissingError: no process can be started.
    """
    request = {"text": "", "tokenizer": TextEncoder(lambda: source)._spec()}
    answer = _PROCESS.ask(json.dumps(request).encode())
    if answer is None:
        raise ValueError(
            f"loading it takes more than {tokenizer_worker.LOAD_CPU_S:g} s or "
            f"{tokenizer_worker.LOAD_MEMORY_BYTES >> 30} GiB"
        )
    if "error" in answer:
        raise ValueError(answer["error"])


def _asked(request: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
    answer = _PROCESS.ask(json.dumps(request).encode(), caller.cancelled)
    if answer is not None:
        return answer
    size = len(request["text"].encode("utf-8", "surrogatepass"))
    seconds = tokenizer_worker.CPU_S + size * tokenizer_worker.CPU_S_PER_BYTE
    most = tokenizer_worker.MEMORY_BYTES + size * tokenizer_worker.MEMORY_PER_BYTE
    raise UserError(
        "prompt: encoding was stopped: the checkpoint's tokenizer took more than "
        f"{seconds:.3g} s or {most >> 20} MiB. Change the text, or use another tokenizer."
    )


_PROCESS = WorkerProcess(tokenizer_worker.__file__, "tokenizer", count=_COUNT)
