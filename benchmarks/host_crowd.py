"""The crowd of ``benchmarks.host``: sequences on a stand-in device, and the cost of their steps.

The engine's process imports this module too.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.host_clients import PROMPT
from benchmarks.simulated_acceptance import acceptance_rate, simulated_acceptance
from benchmarks.stand_in import StandIn
from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.decode.policy.protocol import FixedPolicy
from trt_eagle3.decode.request.request import Request
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.decode.speculation.tree import static_tree
from trt_eagle3.engine.runtime.buckets import padded_size
from trt_eagle3.errors import CheckFailedError

__all__ = ["Cost", "Crowd", "Stretch", "open_on_stand_in"]

_ROOM = 64  # tokens of a prompt, and a reserve
_WARM = 5  # steps before the first measured one
_GATHERING_S = 0.05  # step time until all have started: clients of a busy host arrive one by one
_START_S = 60.0
_POLL_S = 0.002


@dataclass(frozen=True)
class Cost:
    """Milliseconds of a step. ``cpu``: by thread. ``wall``: from one step to the next."""

    cpu: Mapping[str, float]
    wall: float

    @property
    def total(self) -> float:
        """CPU time of all threads."""
        return sum(self.cpu.values())


@dataclass(frozen=True)
class Crowd:
    """``batch`` sequences that decode in one batch on a stand-in device.

    Attributes:
        chain: tokens that a draft proposes; 0: no draft.
        length: acceptance length of a chain.
        steps: measured steps, with all sequences in the batch.
    """

    batch: int
    chain: int = 0
    length: float = 2.0
    steps: int = 100
    step_ms: float = 5.0

    @property
    def num_tokens(self) -> int:
        """Tokens of an answer, enough for the first sequences to run until the last measured step.

        Steps are slow until all sequences have started (``Stretch``).
        """
        steps = _WARM + self.steps + 2 * self.batch
        return 2 * int(steps * (self.length if self.chain else 1.0))

    def request(self) -> Request:
        """Return the request of one sequence."""
        sampling = SamplingParams(max_tokens=self.num_tokens, ignore_eos=True)
        return Request(PROMPT, sampling=sampling, speculation=self.chain > 0)

    def device(self, on_step: Callable[[int], object]) -> StandIn:
        """Return a device with ``step_ms`` per target forward, and 0 per draft forward."""
        return StandIn(lambda f: self.step_ms / 1e3 if f.graph == "target" else 0.0, on_step)

    def open(self, path: Path, device: StandIn, stack: ExitStack) -> LoadedBundle:
        """Open a bundle on ``device`` until ``stack`` is closed."""
        tree = static_tree(SpeculationConfig(steps=self.chain)) if self.chain else None
        stack.enter_context(device.attached())
        if self.chain:
            rate = acceptance_rate(self.length, self.chain)
            stack.enter_context(simulated_acceptance(rate))
        return device.bundle(path, FixedPolicy(tree), self.batch, _ROOM + self.num_tokens)


class Stretch:
    """The measured steps: those with all sequences in the batch, from the sixth on.

    Earlier steps are slow, so that no answer ends before the last one starts.
    """

    def __init__(self, crowd: Crowd, report: Path | None = None) -> None:
        """``report``: a file for another process, which calls ``follow``."""
        self._num_rows = padded_size(crowd.batch, crowd.batch)
        self._left = _WARM + crowd.steps
        self._num_steps = crowd.steps
        self._report = report
        self._armed = report is None
        self._cpu: Mapping[threading.Thread, float] = {}
        self._start = 0.0
        self._over = threading.Event()
        self.cost: Cost | None = None

    def step(self, num_rows: int) -> None:
        """Count a step that begins."""
        if self.over or not self._is_armed():
            return
        if num_rows < self._num_rows:
            time.sleep(_GATHERING_S)
            return
        self._left -= 1
        if self._left == self._num_steps:
            self._begin()
        if self._left == 0:
            self._end()

    def wait(self) -> None:
        """Wait until the measured steps are over.

        Raises:
            CheckFailedError: the steps did not complete in time.
        """
        if not self._over.wait(_START_S + self._num_steps):
            raise CheckFailedError("the crowd did not decode: an answer or a client failed")

    def follow(self, report: Path) -> None:
        """Measure during the stretch of another process; the cost is that of both processes."""
        end = time.monotonic() + _START_S + self._num_steps
        while not report.exists():
            if not self._start and report.with_suffix(".begun").exists():
                self._begin()
            if time.monotonic() > end:
                raise CheckFailedError("the crowd did not decode: an answer or a client failed")
            time.sleep(_POLL_S)
        self._end()
        assert self.cost is not None
        found = json.loads(report.read_text())
        cpu = {name: ms for name, ms in self.cost.cpu.items() if name != "MainThread"}
        cpu |= {f"engine: {name}": ms for name, ms in found["cpu"].items()}
        self.cost = Cost(cpu, found["wall"])

    @property
    def over(self) -> bool:
        """Whether the measured steps are over."""
        return self._over.is_set()

    def _is_armed(self) -> bool:
        """Return whether a server's warm-up is over."""
        if self._report is not None and not self._armed:
            self._armed = self._report.with_suffix(".armed").exists()
        return self._armed

    def _begin(self) -> None:
        self._cpu, self._start = _cpu_seconds(), time.perf_counter()
        if self._report is not None:
            self._report.with_suffix(".begun").touch()

    def _end(self) -> None:
        wall = time.perf_counter() - self._start
        found: dict[str, float] = {}
        for thread, seconds in _cpu_seconds().items():
            name = thread.name.split(" ")[0].rstrip("-_0123456789")  # sum over a thread pool
            taken = 1e3 * (seconds - self._cpu.get(thread, 0.0)) / self._num_steps
            found[name] = found.get(name, 0.0) + taken
        self.cost = Cost(found, 1e3 * wall / self._num_steps)
        if self._report is not None:
            draft = self._report.with_suffix(".draft")
            draft.write_text(json.dumps({"cpu": found, "wall": self.cost.wall}))
            draft.rename(self._report)
        self._over.set()


def _cpu_seconds() -> dict[threading.Thread, float]:
    return {
        thread: time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.ident is not None
    }


def open_on_stand_in(path: Path, crowd: Crowd, report: Path) -> LLM:
    """Open an engine in its own process, which writes its ``Cost`` to ``report``."""
    stretch = Stretch(crowd, report)
    stack = ExitStack()
    atexit.register(stack.close)
    device = crowd.device(stretch.step)
    return LLM(crowd.open(path, device, stack), prefix_cache=False)
