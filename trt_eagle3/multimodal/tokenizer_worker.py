"""The process that encodes texts: a script of its own, which imports nothing of this package.

A tokenizer is a program that a stranger wrote: its patterns may backtrack for ever, its normalizer
may multiply a text, and the library panics where a pattern backtracks too long. Here the kernel
bounds its memory and processor time, and a panic is an answer like any other. Reads one JSON
request a line from standard input, and writes one JSON answer a line.
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

MEMORY_BYTES = 1 << 30  # for one request, beside the tokenizers
MEMORY_PER_BYTE = 512  # of text, more; it takes some 100
CPU_S = 2.0  # for one request
CPU_S_PER_BYTE = 1e-5  # of text, more; it takes some 1e-6
LOAD_MEMORY_BYTES = 2 << 30
LOAD_CPU_S = 20.0  # a tokenizer of 250,000 tokens takes some 2
MAX_TOKENS = 1 << 22  # of a text; no model takes so many
_KEPT = 8  # tokenizers

_Loaded = dict[str, "tuple[Tokenizer, list[int | None]]"]


def main() -> None:
    """Answer requests until standard input ends; ``sys.argv[1]`` is the parent's ``sys.path`` as
    JSON.
    """
    sys.path[:] = json.loads(sys.argv[1])
    # each request is one text; threads would take address space
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    loaded: _Loaded = {}
    for line in sys.stdin.buffer:
        if line == b"\n":  # a request that was cancelled, and is answered already
            continue
        answer = _answer(line, loaded)
        _bound(0, None)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _answer(line: bytes, loaded: _Loaded) -> dict[str, Any]:
    """``ids`` of ``text``, with the ``added`` ids of the tokenizer ``key``; ``unknown``: that has
    to be sent along; ``error``: why there are none.
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
    except BaseException as error:  # a panic of Rust code is no Exception
        return {"error": (str(error) or type(error).__name__)[:1000]}


def _load(key: str | None, spec: dict[str, Any], loaded: _Loaded) -> str:
    """Load a tokenizer; returns its key, which is by default made of what it is."""
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
    """Let the kernel end this process after ``cpu_s``, in the middle of native code too, and refuse
    it more memory than that. 0 and None lift the bounds.
    """
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, 30 * cpu_s)  # and should it hang without computing
    # a system without this limit; the timer holds all the same
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
    """A descriptor: opening it for every text would take longer than encoding most."""
    return os.open("/proc/self/statm", os.O_RDONLY)


if __name__ == "__main__":
    main()
