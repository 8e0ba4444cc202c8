"""The process that encodes texts: a separate script that imports nothing of this package.

A tokenizer is untrusted code. A pattern may backtrack without end, a normalizer may multiply a
text, and the library panics if a pattern backtracks too long. The kernel bounds the memory and
processor time of this process. A panic becomes an error answer. The script reads one JSON request
per line from standard input and writes one JSON answer per line.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import signal
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__: list[str] = []

MEMORY_BYTES = 1 << 30  # per request, beyond the loaded tokenizers
MEMORY_PER_BYTE = 512  # added per byte of text; ordinary tokenizers take about 100
CPU_S = 2.0  # per request
CPU_S_PER_BYTE = 1e-5  # added per byte of text; ordinary tokenizers take about 1e-6
LOAD_MEMORY_BYTES = 2 << 30
LOAD_CPU_S = 20.0  # a tokenizer of 250,000 tokens takes about 2
MAX_TOKENS = 1 << 22  # per text; beyond any model's context
_KEPT = 8  # loaded tokenizers

_Loaded = dict[str, "tuple[Tokenizer, list[int | None]]"]


def main() -> None:
    """Answer requests until standard input ends. ``sys.argv[1]``: the parent's ``sys.path``."""
    sys.path[:] = json.loads(sys.argv[1])
    # a request is a single text, so threads would only use address space
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    loaded: _Loaded = {}
    for line in sys.stdin.buffer:
        if line == b"\n":  # cancels a request that is already answered
            continue
        answer = _answer(line, loaded)
        _bound(0, None)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _answer(line: bytes, loaded: _Loaded) -> dict[str, Any]:
    """Answer one request.

    Keys of the answer: ``ids`` of ``text``; ``added``: ids of the tokens that the tokenizer ``key``
    adds; ``unknown``: ``key`` is not loaded, send the tokenizer; ``error``: why encoding failed.
    """
    try:
        request = json.loads(line)
        key = request.get("key")
        if "tokenizer" in request:
            key = _load(key, request["tokenizer"], loaded)
        if key not in loaded:
            return {"unknown": True}
        tokenizer, added = loaded[key]
        text = request["text"]
        size = len(text.encode())
        _bound(CPU_S + size * CPU_S_PER_BYTE, MEMORY_BYTES + size * MEMORY_PER_BYTE)
        encoded = tokenizer.encode_batch_fast(
            [text], add_special_tokens=request.get("add_special_tokens", True)
        )
        ids = encoded[0].ids
        if len(ids) > MAX_TOKENS:
            return {"error": f"{len(ids)} tokens, expected at most {MAX_TOKENS}"}
        return {"ids": ids, "added": added}
    except BaseException as error:  # panics in Rust are not Exceptions
        return {"error": (str(error) or type(error).__name__)[:1000]}


def _load(key: str | None, spec: dict[str, Any], loaded: _Loaded) -> str:
    """Load a tokenizer and return its key; by default the SHA-256 of its JSON."""
    from tokenizers import AddedToken, Tokenizer

    _bound(LOAD_CPU_S, LOAD_MEMORY_BYTES)
    tokenizer = Tokenizer.from_str(spec["source"])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = spec["encode_special_tokens"]
    for name, flags in spec["added"]:
        tokenizer.add_tokens([AddedToken(name, special=False, **flags)])
    found = key or hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
    while len(loaded) >= _KEPT:
        del loaded[next(iter(loaded))]
    loaded[found] = tokenizer, [tokenizer.token_to_id(name) for name, _ in spec["added"]]
    return found


def _bound(cpu_s: float, memory_bytes: int | None) -> None:
    """Limit this process to ``cpu_s``, even in native code, and ``memory_bytes`` of new memory.

    The kernel ends the process after ``cpu_s``. 0 and None lift the limits.
    """
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, 30 * cpu_s)  # if it hangs without computing
    # some systems lack this limit; the timers still apply
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = hard
        if memory_bytes is not None:
            pages = int(os.pread(_statm(), 64, 0).split()[0])
            most = pages * resource.getpagesize() + memory_bytes
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


@cache
def _statm() -> int:
    """Open /proc/self/statm once: opening it per text takes longer than encoding most texts."""
    return os.open("/proc/self/statm", os.O_RDONLY)


if __name__ == "__main__":
    main()
