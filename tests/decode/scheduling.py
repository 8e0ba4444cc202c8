"""A tiny random pair under a scheduler: prompts of every kind, and what each of them says alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tests.decode.pair import PREFILL_CHUNK, Pair, Recorder, make_pair, make_prompt, run
from trt_eagle3.decode.forward.chunks import MAX_STEP_MS
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.prefix_cache import PrefixCache
from trt_eagle3.decode.policy.protocol import BatchState, FixedPolicy, Policy
from trt_eagle3.decode.request.prompt import Prompt, Vision
from trt_eagle3.decode.schedule.scheduler import Encoder, Scheduler
from trt_eagle3.decode.speculation.dynamic_tree import DynamicTree
from trt_eagle3.decode.speculation.tree import AnyTree, Tree
from trt_eagle3.decode.step.decoder import Decoder
from trt_eagle3.spec import RopeSpec

MAX_SEQ_LEN, MAX_TOKENS, MAX_BATCH = 48, 14, 3
CHAIN = Tree.from_paths([(0,), (0, 0), (0, 0, 0)])
BUSHY = Tree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0)])
TREES: dict[str, AnyTree | None] = {
    "plain": None,
    "chain": CHAIN,
    "bushy": BUSHY,
    "dynamic": DynamicTree(3, 3, 8),
}
LAYOUTS: list[list[Any]] = [
    [9],
    [3, (2, 3), 2, (2, 2), 3],
    [1],
    [17],
    [3, (2, 3), 2, (2, 2), 9],
    [4, (2, 2), 1],
    [33],
]


@cache
def pair() -> Pair:
    rope = RopeSpec.plain(8, 1e4, "interleaved", (2, 1, 1))
    directory = Path(mkdtemp(prefix="trt-eagle3-test-"))  # seed 0 says many different tokens
    return make_pair(directory, seed=0, rope=rope, image_rows="vision", position_shift=1)


@cache
def prompts() -> tuple[Prompt, ...]:
    """Prompts of every kind; some begin alike, in text or in their images."""
    return prompts_of(pair(), LAYOUTS)


def prompts_of(pair: Pair, layouts: Sequence[list[Any]]) -> tuple[Prompt, ...]:
    """A prompt of each layout, with its media by their rows."""
    found = []
    for layout in layouts:
        prompt = make_prompt(pair, layout, seed=1)
        counts = [part[0] * part[1] for part in layout if isinstance(part, tuple)]
        rows = prompt.vision.embeds.split(counts)
        media = tuple((r.numpy().tobytes(), len(r)) for r in rows)
        found.append(dataclasses.replace(prompt, media=media))
    return tuple(found)


@cache
def solo(index: int) -> list[int]:
    prompt = prompts()[index]
    return run(pair(), prompt, None, num_tokens=MAX_TOKENS, max_seq_len=MAX_SEQ_LEN).tokens[
        :MAX_TOKENS
    ]


class Encoding:
    """An ``Encoder`` that knows what the tower would make of ``prompts``, and who asked."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def keeps(self, prompt: Prompt) -> bool:
        return not prompt.visual_rows.any()

    def encode(self, prompt: Prompt) -> Vision:
        index = next(i for i, p in enumerate(prompts()) if p.token_ids is prompt.token_ids)
        self.seen.append(index)
        vision = prompts()[index].vision
        assert vision is not None
        return vision


class TreeFor(FixedPolicy):
    """A policy that is a function of the batch."""

    speculates = True

    def __init__(self, tree_for: Callable[[BatchState], AnyTree | None]) -> None:
        super().__init__(None)
        self._tree_for = tree_for

    def choose(self, batch: BatchState) -> AnyTree | None:
        return self._tree_for(batch)


def make_scheduler(
    pool: PagePool,
    prefixes: PrefixCache | None,
    tree_for: Callable[[BatchState], AnyTree | None] | None = None,
    chunk: int = PREFILL_CHUNK,
    vision: Encoder | None = None,
    policy: Policy | None = None,
    *,
    run_ahead: bool = True,
    max_step_ms: float = MAX_STEP_MS,
) -> Scheduler:
    fixed = pool.table_len is not None
    shapes: dict[str, Any] = {"fixed_shapes": fixed, "prefill_chunk": chunk}
    drafter = pair().drafter(Recorder(), **shapes)
    decoder: Decoder = pair().decoder(
        Recorder(), MAX_SEQ_LEN, drafter, run_ahead=run_ahead, **shapes
    )
    return Scheduler(
        decoder,
        max_batch_size=MAX_BATCH,
        policy=TreeFor(tree_for) if tree_for else policy,
        prefix_cache=prefixes,
        vision=vision,
        max_step_ms=max_step_ms,
    )


def finish(scheduler: Scheduler, limit: int = MAX_TOKENS) -> dict[int, list[int]]:
    """Tokens of every sequence by ``id``, stepped until nobody is left."""
    output_ids: dict[int, list[int]] = {}
    while scheduler.running or scheduler.waiting:
        emissions = scheduler.step()
        assert len({id(e.sequence) for e in emissions}) == len(emissions), "it emits once a step"
        for emission in emissions:
            assert emission.error is None
            tokens = output_ids.setdefault(id(emission.sequence), [])
            tokens += emission.tokens
            if len(tokens) >= limit or emission.full:
                scheduler.remove(emission.sequence)
    return output_ids
