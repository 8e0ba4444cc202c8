"""EngineCore: one thread that encodes images, steps the scheduler and delivers its tokens.

Pipeline of a request: ``Request`` -> (``PreprocessStage``) -> ``PreparedRequest`` ->
``SequenceState`` -> tokens -> ``Answer``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from trt_eagle3.decode.delivery import CANCELLED, Delivery, Ended, outcome_of
from trt_eagle3.decode.forward.chunks import MAX_STEP_MS
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.decode.memory.prefix_cache import PrefixCache
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.metrics import Meter
from trt_eagle3.decode.policy.protocol import Policy
from trt_eagle3.decode.request.answer import Answer, wake_readers
from trt_eagle3.decode.request.output import Output
from trt_eagle3.decode.request.preprocess import (
    PreparedRequest,
    PreprocessResult,
    PreprocessStage,
    PromptPreprocessor,
)
from trt_eagle3.decode.request.request import Request
from trt_eagle3.decode.request.stopwatch import Stopwatch
from trt_eagle3.decode.schedule.emission import Emission
from trt_eagle3.decode.schedule.scheduler import Scheduler
from trt_eagle3.decode.warm_up import (
    capture_steps,
    measure_costs,
    open_tower,
    run_backfills,
    run_images,
    run_prompts,
)
from trt_eagle3.engine.runtime.memory import num_pages
from trt_eagle3.errors import (
    ClosedError,
    EngineFailedError,
    OverloadedError,
    RankFailedError,
    RequestCancelledError,
    as_failure,
    clip,
    is_failure,
    release_frames,
)
from trt_eagle3.multimodal.caller import Caller

__all__ = ["ENGINE_STOPPED", "EngineCore"]

_log = logging.getLogger("trt_eagle3")
ENGINE_STOPPED = "the engine has stopped. Load it again."
_MEASURE_SECONDS = 0.5  # delay of the second token of an engine that was not warmed up
_POLL_SECONDS = 0.02  # interval of polling readers that lag
_STUCK_SECONDS = 3.0  # for the decoding thread to end after a rank has failed


class EngineCore:
    """Owns the pages and the scheduler. Only its thread uses them while it runs."""

    def __init__(
        self,
        bundle: LoadedBundle,
        preprocessor: PromptPreprocessor,
        meter: Meter,
        *,
        prefix_cache: bool = True,
        max_step_ms: float = MAX_STEP_MS,
        on_death: Callable[[], object] = lambda: None,
    ) -> None:
        """Open the graphs of ``bundle`` and start to serve. It must not be used elsewhere then.

        ``max_step_ms``: as for ``Scheduler``. ``on_death``: called on any thread once the engine
        has failed; perhaps twice.
        """
        self.pool = bundle.page_pool()
        self.prefixes = PrefixCache(self.pool) if prefix_cache else None
        self._vision = bundle.vision_encoder()
        self.scheduler = Scheduler(
            bundle.decoder,
            max_batch_size=bundle.limits.max_batch_size,
            policy=bundle.policy,
            prefix_cache=self.prefixes,
            vision=self._vision,
            max_step_ms=max_step_ms,
        )
        self._bundle = bundle
        self._preprocessor = preprocessor
        self._stage = PreprocessStage(preprocessor, bundle.limits.max_waiting)
        self._meter = meter
        self._max_waiting = bundle.limits.max_waiting
        self._news = threading.Condition()
        self._inbox: list[tuple[Answer, SequenceState]] = []
        self._delivery = Delivery(meter)
        self._tasks: list[tuple[Callable[[], int], Future[int]]] = []
        self._num_preparing = 0
        self._num_stalled = 0  # backpressured sequences in the scheduler's queue
        self._closing = self._draining = False
        self._tower_is_opened = False
        self._step = Stopwatch()
        self._on_death = on_death
        self._lost: RankFailedError | None = None
        if bundle.ranks is not None:
            bundle.ranks.on_failure(self._lose)
        self._thread = threading.Thread(target=self._run, name="trt-eagle3-decode", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether new requests are accepted and will be answered."""
        return self._thread.is_alive() and not self._closing and not self._draining

    @property
    def num_waiting(self) -> int:
        """Requests that wait to run. Sequences preempted for a lagging reader do not count."""
        with self._news:
            waiting = max(len(self.scheduler.waiting) - self._num_stalled, 0)
            return self._num_preparing + len(self._inbox) + waiting

    @property
    def step_seconds(self) -> float:
        """Seconds since the last step ended or, if later, work arrived; 0 without work."""
        return self._step.seconds if self._thread.is_alive() else 0.0

    @property
    def prepare_seconds(self) -> float:
        """Seconds since a text was last prepared or, if later, the oldest arrived; 0 if idle."""
        return self._stage.seconds if self.alive else 0.0

    def use_policy(self, policy: Policy) -> None:
        """Replace the speculation policy. Do not call it while requests are in flight."""
        self.scheduler.policy = policy

    def now(self) -> dict[str, int]:
        """Return the current state that ``Meter`` does not count."""
        cached = self.prefixes.num_idle if self.prefixes else 0
        # read first: a request that starts meanwhile is counted twice, not lost
        waiting = self.num_waiting
        return {
            "running": len(self.scheduler.running),
            "waiting": waiting,
            "preempted": self.scheduler.num_preempted,
            "reused_tokens": self.scheduler.num_reused_rows,
            "kv_pages_used": self.pool.num_used - cached,
            "kv_pages_cached": cached,
            "kv_pages_total": self.pool.num_pages - 1,
            **self._vision.counts,
        }

    def restart_counts(self) -> None:
        """Reset hits and misses of the cache of embeddings."""
        self._vision.restart_counts()

    @staticmethod
    def idle(bundle: LoadedBundle) -> dict[str, int]:
        """Return what ``now`` returns before the first request."""
        names = ("running", "waiting", "preempted", "reused_tokens")
        pages = {"kv_pages_used": 0, "kv_pages_cached": 0}
        total = num_pages(bundle.limits, bundle.page_size) - 1
        return {**dict.fromkeys(names, 0), **pages, "kv_pages_total": total}

    def submit(self, request: Request, keeps: object = None) -> Answer:
        """Accept a request; another thread prepares it.

        ``keeps``: an object that must live as long as the answer.

        Raises:
            OverloadedError: too many requests wait already, or no thread could be started.
            ClosedError: the engine has stopped.
        """
        with self._news:
            answer = self._accept(keeps)
            if request.has_media:
                self._begin_to_open_tower()
            try:
                future = self._stage.submit(request, self._caller(request, answer))
            except BaseException:
                self._num_preparing -= 1
                answer.cancelled = True  # ends the request if it was queued nevertheless
                raise
        future.add_done_callback(lambda done: self._prepared(answer, done))
        return answer

    def submit_together(self, requests: Sequence[Request], keeps: object = None) -> list[Answer]:
        """Accept requests so that all are available to the same step.

        They are prepared on this thread, and decoding waits for it.

        Raises:
            OverloadedError, ClosedError: as for ``submit``; earlier requests stay accepted.
        """
        answers = []
        with self._news:
            for request in requests:
                answer = self._accept(keeps)
                answers.append(answer)
                self._take(answer, self._preprocessor.run(request, self._caller(request, answer)))
        return answers

    def capture_graphs(self, seconds: float) -> int:
        """Capture the CUDA graphs of decoding, in at most ``seconds``.

        If no request is running, it also runs images and prompts of every size. Returns the number
        of batch sizes that are ready.

        Raises:
            ClosedError: the engine is closed, or was closed before this began. EngineFailedError:
                the decoding thread died.
        """
        decoder, table_len = self._bundle.decoder, self.pool.table_len
        if table_len is None or not decoder.captures_steps:
            return 0
        policy = self.scheduler.policy

        def work() -> int:
            if not self.scheduler.running:  # prompts would take memory of running sequences
                self._run_shapes(policy)
            return capture_steps(decoder, policy, table_len, seconds)

        return self._ask(work)

    def open_tower(self) -> None:
        """Open the vision tower, if the target has one, and load its kernels.

        Raises:
            ClosedError, EngineFailedError: as for ``capture_graphs``. UserError,
                EnvironmentMissingError: the tower cannot be opened.
        """
        if self._bundle.spec.vision is not None:
            self._tower_is_opened = True
            self._ask(self._open_tower)

    def _begin_to_open_tower(self) -> None:
        """Open the tower between two steps, while the first image is decoded.

        If that fails, it fails again where the image is encoded, and its request gets the error.
        The caller holds the lock.
        """
        if self._bundle.spec.vision is not None and not self._tower_is_opened:
            self._tower_is_opened = True
            self._tasks.append((self._open_tower, Future()))
            self._news.notify_all()

    def _open_tower(self) -> int:
        open_tower(self._bundle)
        return 1

    def _run_shapes(self, policy: Policy) -> None:
        """Run the shapes of images, prompts and backfills before requests need them."""
        decoder, vocab_size = self._bundle.decoder, self._bundle.spec.vocab_size
        run_images(self._bundle)
        prompts = run_prompts(decoder, self.pool, vocab_size)
        if prompts.seconds:
            policy.prime_prompts(prompts.num_rows, prompts.seconds)
        if policy.speculates:
            run_backfills(decoder, self.pool, vocab_size)

    def _measure_costs(self) -> None:
        """Time steps of a few batch sizes for the policy, if no warm-up did."""
        decoder, table_len = self._bundle.decoder, self.pool.table_len
        if table_len is not None and decoder.captures_steps:
            measure_costs(decoder, self.scheduler.policy, table_len, _MEASURE_SECONDS)

    def _ask(self, task: Callable[[], int]) -> int:
        """Run ``task`` on the decoding thread between two steps; returns its result.

        Raises:
            Exception: that ``task`` raised.
            ClosedError, EngineFailedError: as for ``capture_graphs``.
        """
        done: Future[int] = Future()
        with self._news:
            if not self.alive:
                raise ClosedError(ENGINE_STOPPED)
            self._tasks.append((task, done))
            self._news.notify_all()
        return done.result()

    def close(self, *, drain: bool = False) -> None:
        """Stop; requests in flight are cancelled, or with ``drain`` answered first."""
        with self._news:
            self._draining |= drain
            self._closing |= not drain
            self._news.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._stage.close()

    def _caller(self, request: Request, answer: Answer) -> Caller:
        return Caller(request.client, lambda: answer.cancelled or self._closing)

    def _accept(self, keeps: object) -> Answer:
        if not self.alive:
            raise ClosedError(ENGINE_STOPPED)
        if self.num_waiting >= self._max_waiting:
            raise OverloadedError(
                f"{self.num_waiting} requests wait already (limits.max_waiting). Try again later."
            )
        if self._num_stalled >= self._max_waiting:
            raise OverloadedError(
                f"{self._num_stalled} answers are not read (limits.max_waiting). Read them first."
            )
        self._num_preparing += 1
        return Answer(self._wake, keeps)

    def _wake(self) -> None:
        with self._news:
            self._news.notify_all()

    def _prepared(self, answer: Answer, done: Future[PreprocessResult]) -> None:
        self._take(answer, done.result())

    def _take(self, answer: Answer, result: PreprocessResult) -> None:
        """Put a prepared request into the inbox, or end a request that failed."""
        error = result if isinstance(result, Exception) else None
        if error is not None:
            release_frames(error)
        ready: SequenceState | None = None
        if isinstance(result, PreparedRequest):
            try:
                ready = self._begin(answer, result)
            except BaseException as caught:  # reported to the reader
                error = as_failure(caught)
        with self._news:
            self._num_preparing -= 1
            if self._closing:
                ready = None
            if ready is not None:
                self._inbox.append((answer, ready))
            self._news.notify_all()
        if ready is None:
            self._refuse(answer, None if isinstance(error, RequestCancelledError) else error)

    def _begin(self, answer: Answer, prepared: PreparedRequest) -> SequenceState:
        """Create the sequence of a request, and the output of its answer."""
        request, prompt, spec = prepared.request, prepared.prompt, self._bundle.spec
        ends = self._bundle.processor.end_token_ids
        drafting = request.speculation and self._bundle.manifest is not None
        sequence = SequenceState(
            prompt,
            self.pool,
            spec.vocab_size,
            request.sampling,
            drafting and self.scheduler.policy.speculates,
            prepared.grammar,
            () if request.sampling.ignore_eos else ends,
        )
        decoder = self._bundle.processor.stream_decoder()
        answer.output = Output(request.sampling, decoder, ends)
        answer.prompt_tokens = len(prompt.token_ids)
        self._meter.begun(answer.prompt_tokens)
        return sequence

    def _refuse(self, answer: Answer, error: Exception | None) -> None:
        """End a request that did not become a sequence; without an error it was cancelled."""
        self._meter.finished("cancelled" if error is None else outcome_of(error))
        if error is None:
            answer.put(CANCELLED)
        answer.end(error)
        wake_readers([answer])

    def _run(self) -> None:
        try:
            self._serve()
        except RankFailedError as error:
            _log.error("%s", error)
            self._fail_all(error)
        except BaseException as error:
            _log.exception("the decoding thread died")
            self._fail_all(error)
            raise

    def _fail_all(self, error: BaseException) -> None:
        """End all tasks and answers with ``error``; accept no more."""
        with self._news:
            self._closing = True
        self._end_tasks(_death_of(error))
        for answer, _ in self._readers():
            if answer is not None:
                self._delivery.fail(answer, error)
        self._delivery.close()
        self._on_death()

    def _lose(self, error: RankFailedError) -> None:
        """End the decoding thread: a rank has failed. Called on another thread."""
        with self._news:
            self._lost = error
            self._news.notify_all()
        self._thread.join(_STUCK_SECONDS)
        if self._thread.is_alive():  # it waits for the device, which waits for that rank
            _log.error("%s", error)
            self._fail_all(error)

    @torch.inference_mode()
    def _serve(self) -> None:
        self._step.start()
        while self._wait():
            # a separate call, so that this thread keeps no reference to a request while it waits
            self._turn()
            self._step.start()
        self._end_tasks(ClosedError(ENGINE_STOPPED))
        self._end([self._delivery.end(a, s, "cancelled") for a, s in self._readers()])

    def _readers(self) -> list[tuple[Answer | None, SequenceState]]:
        """Return all sequences with answers; None if the answer is no longer referenced."""
        return [*self._delivery, *self._inbox]

    def _turn(self) -> None:
        """Take new requests and tasks, and run one step."""
        with self._news:
            for answer, sequence in self._inbox:
                self._delivery.add(answer, sequence)
                self.scheduler.add(sequence)
            self._inbox.clear()
        self._run_tasks()
        # not before the first token of the first request
        if self.scheduler.policy.needs_costs and any(s.tokens for s in self.scheduler.running):
            self._measure_costs()
        self._end(self._delivery.poll_clients(draining=self._draining))
        try:
            emissions = self.scheduler.step()
        except BaseException as caught:  # a forward failed: its results cannot be trusted
            if not is_failure(caught):
                raise
            error = as_failure(caught)
            _log.exception("a step failed")
            self._check_device()
            emissions = [Emission(sequence, (), error=error) for sequence in self.scheduler.reset()]
        if self.scheduler.num_draft_tokens is not None:
            self._meter.batch_cycle(self.scheduler.num_draft_tokens)
        self._end(self._delivery.deliver(emissions))
        self._num_stalled = sum(sequence.backpressured for sequence in self.scheduler.waiting)

    def _end(self, ended: Sequence[Ended]) -> None:
        """Release the memory of ended requests, then wake their readers."""
        for one in ended:
            self.scheduler.remove(one.sequence)
        self._delivery.close(ended)

    def _run_tasks(self) -> None:
        """Run the tasks of other threads.

        A task stays in the list while it runs. If it kills this thread, its caller gets the error.
        """
        while self._tasks and not self._closing:
            task, done = self._tasks[0]
            result, failure = 0, None
            try:
                result = task()
            except Exception as error:  # re-raised in the calling thread
                failure = error
            with self._news:
                del self._tasks[0]
            if failure is None:
                done.set_result(result)
            else:
                done.set_exception(failure)

    def _end_tasks(self, error: Exception) -> None:
        """Fail all tasks that will not run."""
        with self._news:
            tasks, self._tasks = self._tasks, []
        for _, done in tasks:
            done.set_exception(error)

    def _check_device(self) -> None:
        """Raise if the GPU is unusable, which ends this thread: every step would fail.

        Raises:
            RuntimeError: from CUDA, for example after an illegal access.
        """
        if self._bundle.device == "cuda":
            torch.cuda.synchronize()

    def _wait(self) -> bool:
        """Sleep until there is work; returns False if the thread must stop."""
        with self._news:
            while not self._has_news() and self.scheduler.idle:
                if self._draining and not self._delivery and not self._num_preparing:
                    return False
                unread = bool(self._delivery)
                self._step.stop()
                self._news.wait(_POLL_SECONDS if unread else None)
                self._step.start()
                if unread:
                    break
            if self._lost is not None:
                raise self._lost
            return not self._closing

    def _has_news(self) -> bool:
        return bool(self._closing or self._lost or self._inbox or self._tasks)


def _death_of(error: BaseException) -> EngineFailedError:
    """Make the error for callers of the decoding thread, which died of ``error``."""
    if isinstance(error, RankFailedError):
        return error
    what = f"{type(error).__name__}: {error}"
    failure = EngineFailedError(f"the decoding thread died ({clip(what)}). Load it again.")
    failure.__cause__ = error
    return failure
