"""Adaptive plans under simulated loads whose prompts are prefilled beside cycles:
``python -m tests.decode.simulated_prompts`` prints tokens per second over those of the same clients
served plainly.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from tests.decode.simulated_load import CycleMs, PromptLoad, h200_ms, rate_of
from tests.decode.simulated_plan import CHAIN, DEPTHS, primed
from trt_eagle3.decode.plan import Plan, shrunk

Phase = tuple[CycleMs, int, int]
"""What cycles take, for how many that are not counted and how many that are."""
LOADS = tuple(product((8, 32, 128), (128, 32, 12), (4, 1)))
"""Clients, tokens of an answer, and prompts that a forward holds."""
LENGTHS = (1.0, 1.5, 2.0, 3.0)
PROMPT_MS = 5.0
LEARNING, CYCLES = 100, 1000


def speeds(plan: Any, size: int, rate: float, phases: Sequence[Phase], **load: Any) -> list[float]:
    """Tokens per second in each of ``phases``."""
    run, found = PromptLoad(plan, size, rate, phases[0][0], **load), []
    for run.cycle_ms, before, counted in phases:
        run.run(before)
        tokens, seconds = run.tokens, run.seconds
        run.run(counted)
        found.append((run.tokens - tokens) / (run.seconds - seconds))
    return found


def over_plain(
    plan: Any, size: int, rate: float, phases: Sequence[Phase], **load: Any
) -> list[float]:
    """The same over what a server serves that has no draft."""
    served = speeds(plan, size, rate, phases, **load)
    plain = speeds(Plan({1: None}), size, rate, phases, **load | {"draft_ms": 0.0})
    return [mine / other for mine, other in zip(served, plain, strict=True)]


def main() -> None:
    """Print what every load gains after its first cycles, and what the best chain does."""
    print("clients | tokens of an answer | prompts at once | length | over plain | best chain")
    for (size, answer, at_once), length in product(LOADS, LENGTHS):
        load: dict[str, Any] = {"answer": answer, "at_once": at_once, "prompt_ms": PROMPT_MS}
        plans = [primed(h200_ms), *(Plan({1: shrunk(CHAIN, d + 1)}) for d in DEPTHS if d)]
        phases = [(h200_ms, LEARNING, CYCLES)]
        live, *fixed = (over_plain(p, size, rate_of(length), phases, **load)[0] for p in plans)
        best = max(1.0, *fixed)
        print(size, answer, at_once, length, f"{live:.3f}", f"{best:.3f}", sep=" | ", flush=True)


if __name__ == "__main__":
    main()
