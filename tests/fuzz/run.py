"""Fuzzing:

``python -m tests.fuzz.run --seconds 120`` (``make fuzz``). What it finds is written beside the
corpus.
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from tests.fuzz.mutate import mutate
from tests.fuzz.targets import TARGETS, built_bundle, case_files
from trt_eagle3.engine.bundle.record import BUNDLE_FILE
from trt_eagle3.errors import UserError

__all__ = ["MAX_LINE_LEN", "check", "corpus"]

MAX_LINE_LEN = 400  # of a refusal, without the name of the folder
LONGER = {"bundle": 1200}  # where engine/bundle/read.py does not cut what it quotes
MAX_SECONDS = 8.0  # of processor time, for one text
MAX_WAIT = 120.0  # seconds, for the answer of another process
MAX_GROWTH_KB = 400_000  # of the most memory that this process ever had, by one text


def corpus(target: str) -> list[bytes]:
    """The cases of a target, in order, and sound ones that are made; those of ``tests.fuzz.large``
    are not among them, as mutating them finds nothing that smaller ones do not.
    """
    cases = [file.read_bytes() for file in case_files(target).values()]
    return cases + (
        [(built_bundle() / BUNDLE_FILE).read_bytes()] * len(cases) if target == "bundle" else []
    )


def check(target: str, text: bytes, folder: Path) -> str:
    """Say what ``target`` does wrong with ``text``; nothing where it takes it, or refuses it in
    one short line soon.
    """
    start, before = time.process_time(), _peak_kb()
    try:
        with _interrupted():
            TARGETS[target](text, folder)
    except UserError as error:
        line = str(error).replace(str(folder), "")
        if len(line) > LONGER.get(target, MAX_LINE_LEN) or not line.isprintable():
            return f"a refusal of {len(line)} characters, or of more than a line: {line[:600]!r}"
    except KeyboardInterrupt:
        raise
    except BaseException:  # panics of libraries in Rust are no Exception
        return traceback.format_exc(limit=-6)
    seconds, growth = time.process_time() - start, _peak_kb() - before
    if seconds > MAX_SECONDS or growth > MAX_GROWTH_KB:
        return f"{seconds:.1f} s of processor time, {growth} KB more memory"
    return ""


class _EndlessError(BaseException):
    """Nothing that is fuzzed may catch it."""


@contextmanager
def _interrupted() -> Iterator[None]:
    """Raise in what takes twice the processor time that it may, or waits for too long."""

    def interrupt(number: int, _: object) -> None:
        limit = f"{MAX_SECONDS:g} s of processor time"
        raise _EndlessError(limit if number == signal.SIGPROF else f"{MAX_WAIT:g} s")

    timers = {
        signal.SIGPROF: (signal.ITIMER_PROF, 2 * MAX_SECONDS),
        signal.SIGALRM: (signal.ITIMER_REAL, MAX_WAIT),
    }
    handlers = {number: signal.signal(number, interrupt) for number in timers}
    for timer, seconds in timers.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for number, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, handlers[number])


def _peak_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> int:
    """Mutate the corpus until the time is up; 1 where something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 32))
    parser.add_argument(
        "--found", type=Path, default=Path("fuzz-found"), help="folder for what is found"
    )
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="target",
        help=f"of {', '.join(TARGETS)}; all if none is named",
    )
    arguments = parser.parse_args()
    random = Random(arguments.seed)
    targets = arguments.targets or list(TARGETS)
    print(f"seed {arguments.seed}, {arguments.seconds:g} s, {', '.join(targets)}", flush=True)
    seeds = {name: corpus(name) for name in targets}
    found: set[str] = set()
    count, end = 0, time.monotonic() + arguments.seconds
    while time.monotonic() < end:
        target = targets[count % len(targets)]
        count += 1
        text = mutate(random.choice(seeds[target]), random)
        with tempfile.TemporaryDirectory() as folder:
            wrong = check(target, text, Path(folder))
        kind = f"{target}: {wrong.strip().splitlines()[-1][:80]}" if wrong else ""
        if wrong and kind not in found:
            found.add(kind)
            file = arguments.found / target / hashlib.sha256(text).hexdigest()[:12]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text)
            print(f"{file}\n{wrong}", flush=True)
    print(f"{count} texts, {len(found)} kinds of fault", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
