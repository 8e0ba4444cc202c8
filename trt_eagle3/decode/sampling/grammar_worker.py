"""Script of the process that tries grammars.

A grammar is untrusted input. Most compile in a millisecond; a few become automata of millions of
states. So a fork of this process first reads, compiles and walks each grammar. The kernel bounds
the fork's processor time and memory. The script reads the tokenizer as one line of JSON, then one
grammar per line. It writes one JSON answer per line. New input, or the end of input, stops the
current grammar.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import select
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

__all__: list[str] = []

CPU_S = 0.6  # processor seconds of one grammar, walk included
WALL_S = 20.0  # seconds of one grammar, on a busy machine
MEMORY_BYTES = 512 << 20  # beyond the tokenizer's
STEP_S = 0.05  # most seconds of a token in the walk; the engine would wait for it
WALK_TOKENS, WALKS = 24, 3
LIMITS: dict[str, Any] = {
    "max_items_in_row": 1000,
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""llguidance's limits, used here and in the engine."""


def main() -> None:
    """Try grammars until standard input ends. ``sys.argv[1]``: the parent's ``sys.path``."""
    sys.path[:] = json.loads(sys.argv[1])
    from llguidance import LLTokenizer

    import_module("trt_eagle3.decode.sampling.grammar_text")  # import once, not in every fork
    vocabulary = json.loads(sys.stdin.buffer.readline())
    tokenizer = LLTokenizer(
        vocabulary["tokenizer"], n_vocab=vocabulary["size"], eos_token=vocabulary["ends"]
    )
    for line in sys.stdin.buffer:
        if line == b"\n":  # a cancel that arrived after the answer
            continue
        sys.stdout.buffer.write(_bounded(tokenizer, json.loads(line)) + b"\n")
        sys.stdout.buffer.flush()


def _bounded(tokenizer: Any, grammar: Any, stop: int = 0) -> bytes:
    """Try ``grammar`` in a fork and return its answer, or the signal that ended the fork.

    ``stop``: a descriptor; the fork is killed when it becomes readable.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            _bound()
            answer = json.dumps(_try(tokenizer, grammar)).encode()
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(answer)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        if reader not in select.select([reader, stop], [], [])[0]:
            os.kill(child, signal.SIGKILL)
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    return answer or json.dumps({"ended": -os.waitstatus_to_exitcode(status)}).encode()


def _bound() -> None:
    """Set signals and limits that end this process even inside native code."""
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    with contextlib.suppress(ValueError, OSError, StopIteration):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _try(tokenizer: Any, grammar: dict[str, str]) -> dict[str, Any]:
    """Try ``grammar``, the fields of a ``Grammar``; returns one of three answers.

    ``text``: llguidance's form of it. ``error``: why it is refused. ``slow``: seconds of a token.
    """
    from trt_eagle3.decode.sampling.grammar import Grammar
    from trt_eagle3.decode.sampling.grammar_text import grammar_text

    try:
        text = grammar_text(Grammar(**grammar))  # type: ignore[arg-type]
        return _walk(tokenizer, text) or {"text": text}
    except BaseException as error:  # MemoryError and panics of Rust code among them
        return {"error": (str(error) or type(error).__name__)[:1000]}


def _walk(tokenizer: Any, text: str) -> dict[str, Any]:
    """Walk through the grammar with random tokens; returns ``error``, ``slow`` or nothing."""
    from llguidance import LLMatcher, LLParserLimits

    first = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**LIMITS))
    if first.is_error():
        return {"error": first.get_error()[:1000]}
    chance = random.Random(0)
    for _ in range(WALKS):
        matcher = first.deep_copy()
        for step in range(WALK_TOKENS):
            start = time.process_time()
            mask = matcher.compute_bitmask()
            if matcher.is_error() or not any(mask):
                return {"error": _dead(matcher.get_error(), step)}
            if matcher.is_stopped():
                break
            matcher.consume_token(_drawn(mask, chance))
            seconds = time.process_time() - start
            if seconds > STEP_S:
                return {"slow": seconds}
    return {}


def _dead(reason: str, step: int) -> str:
    if "NoExtension" in reason or not reason:
        return "no token can satisfy it" + (f" after {step} others" if step else "")
    return reason[:1000]


def _drawn(mask: bytes, chance: random.Random) -> int:
    """Draw a token that ``mask`` allows; one bit per token."""
    places = [i for i, byte in enumerate(mask) if byte]
    place = chance.choice(places)
    return place * 8 + chance.choice([bit for bit in range(8) if mask[place] >> bit & 1])


if __name__ == "__main__":
    main()
