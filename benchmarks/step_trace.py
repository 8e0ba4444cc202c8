"""Trace of an engine's thread: duration of steps by kind, and its idle time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import wraps
from statistics import median
from typing import Any
from unittest.mock import patch

from torch import Tensor

from trt_eagle3.decode.core import EngineCore
from trt_eagle3.decode.forward.runner import AttentionMetadata, TargetInputs, TargetRunner
from trt_eagle3.decode.request.vision_encoder import VisionEncoder
from trt_eagle3.decode.schedule.emission import Emission
from trt_eagle3.decode.schedule.scheduler import Scheduler

__all__ = ["Kind", "TracedStep", "StepTrace", "kinds"]

_BATCHES = (8, 32, 64)  # bounds of batch sizes per kind
_LEAST_S = 5e-5  # least gap that counts
_ROWS = (256, 512, 1024)  # bounds of prompt rows per kind, padding included


@dataclass(frozen=True)
class TracedStep:
    """One step of the scheduler.

    Attributes:
        seconds: from its beginning to its end; launched work may still run.
        before: time since the previous step ended.
        waited: the part of ``before`` without work.
        prompt_rows: rows of prompts, padding included.
        batch: decoding sequences, padding included.
        drafted: drafted tokens that each of them verifies.
        images: prompts whose images were encoded.
        mixed: prompts and sequences in one forward.
    """

    seconds: float = 0.0
    before: float = 0.0
    waited: float = 0.0
    prompt_rows: int = 0
    batch: int = 0
    drafted: int = 0
    images: int = 0
    mixed: bool = False

    @property
    def kind(self) -> str:
        """The kind of the step: its work and its approximate size."""
        parts = []
        if self.images:
            parts.append("images")
        if self.prompt_rows:
            parts.append(f"prompts {_up_to(self.prompt_rows, _ROWS)}")
        if self.batch:
            what = f"chain of {self.drafted}" if self.drafted else "plain"
            parts.append(f"{what} {_up_to(self.batch, _BATCHES)}")
        return (" with " if self.mixed else ", ").join(parts) or "nothing"


def _up_to(number: int, limits: Sequence[int]) -> str:
    most = next((limit for limit in limits if number <= limit), None)
    return f">{limits[-1]}" if most is None else f"<={most}"


class StepTrace:
    """Records every step of this process's engines while it is entered.

    Attributes:
        steps: finished steps.
    """

    def __init__(self) -> None:
        self.steps: list[TracedStep] = []
        self._now = TracedStep()
        self._end: float | None = None
        self._waited = 0.0
        self._stack = ExitStack()

    def __enter__(self) -> StepTrace:
        for holder, name, traced in (
            (Scheduler, "step", self._traced_step),
            (TargetRunner, "forward", self._traced_forward),
            (TargetRunner, "forward_mixed", self._traced_mixed),
            (VisionEncoder, "encode", self._traced_encode),
            (EngineCore, "_wait", self._traced_wait),
        ):
            self._stack.enter_context(patch.object(holder, name, traced(getattr(holder, name))))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _traced_step(self, true: Any) -> Any:
        @wraps(true)
        def step(scheduler: Scheduler) -> list[Emission]:
            start = time.perf_counter()
            before = 0.0 if self._end is None else start - self._end
            self._now = TracedStep(before=before, waited=min(self._waited, before))
            try:
                return true(scheduler)  # type: ignore[no-any-return]
            finally:
                self._end, self._waited = time.perf_counter(), 0.0
                self.steps.append(replace(self._now, seconds=self._end - start))

        return step

    def _traced_forward(self, true: Any) -> Any:
        @wraps(true)
        def forward(
            runner: TargetRunner,
            embeds: Tensor,
            metadata: AttentionMetadata,
            *args: Any,
            **more: Any,
        ) -> Any:
            size, width = embeds.shape[:2]
            now = self._now
            if metadata.is_prompt:
                self._now = replace(now, prompt_rows=now.prompt_rows + size * width)
            else:
                self._now = replace(now, batch=size, drafted=width - 1)
            return true(runner, embeds, metadata, *args, **more)

        return forward

    def _traced_mixed(self, true: Any) -> Any:
        @wraps(true)
        def mixed(
            runner: TargetRunner, prompts: TargetInputs, steps: TargetInputs, reduce: Any
        ) -> Any:
            rows = prompts.embeds.shape[:2].numel() + self._now.prompt_rows
            batch, width = steps.embeds.shape[:2]
            self._now = replace(
                self._now, prompt_rows=rows, batch=batch, drafted=width - 1, mixed=True
            )
            return true(runner, prompts, steps, reduce)

        return mixed

    def _traced_encode(self, true: Any) -> Any:
        @wraps(true)
        def encode(*args: Any) -> Any:
            self._now = replace(self._now, images=self._now.images + 1)
            return true(*args)

        return encode

    def _traced_wait(self, true: Any) -> Any:
        @wraps(true)
        def wait(core: EngineCore) -> bool:
            start = time.perf_counter()
            try:
                return true(core)  # type: ignore[no-any-return]
            finally:
                self._waited += time.perf_counter() - start

        return wait


@dataclass(frozen=True)
class Kind:
    """Steps of one kind.

    Attributes:
        median_ms: of one step.
        seconds: of all steps.
    """

    name: str
    count: int
    median_ms: float
    seconds: float


def kinds(steps: Sequence[TracedStep]) -> list[Kind]:
    """Group ``steps`` by kind, the longest total first; includes the time between steps.

    That time is split into time with and without work.
    """
    found: dict[str, list[TracedStep]] = {}
    for step in steps:
        found.setdefault(step.kind, []).append(step)
    named = [_kind(name, some) for name, some in found.items()]
    waits = [step.waited for step in steps]
    gaps = [step.before - step.waited for step in steps]
    for name, seconds in (("between steps", gaps), ("nothing to do", waits)):
        some = [taken for taken in seconds if taken > _LEAST_S]
        if some:
            named.append(Kind(name, len(some), 1e3 * median(some), sum(some)))
    return sorted(named, key=lambda kind: -kind.seconds)


def _kind(name: str, steps: Sequence[TracedStep]) -> Kind:
    seconds = [step.seconds for step in steps]
    return Kind(name, len(steps), 1e3 * median(seconds), sum(seconds))
