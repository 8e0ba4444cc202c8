"""Preprocessing: turn requests into tokens, positions and decoded images, on separate threads.

A text takes milliseconds. Images and new grammars may take many seconds. So they have their own
threads, and no text waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from trt_eagle3.config import LimitsConfig
from trt_eagle3.decode.request.conversation import Conversation, RawPrompt
from trt_eagle3.decode.request.prompt import Prompt, media_digests
from trt_eagle3.decode.request.request import Request
from trt_eagle3.decode.request.stopwatch import Stopwatch
from trt_eagle3.decode.sampling.grammar_compiler import GrammarCompiler
from trt_eagle3.decode.sampling.grammar_state import GrammarState
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.errors import OverloadedError, UserError, as_failure, clip
from trt_eagle3.multimodal import ModelInputs, Processor
from trt_eagle3.multimodal.caller import NO_CALLER, Caller
from trt_eagle3.spec import TargetSpec

__all__ = ["PreprocessResult", "PreparedRequest", "PreprocessStage", "PromptPreprocessor"]

_TOKENISING = 2  # threads that prepare texts while the core decodes


@dataclass(frozen=True)
class PreparedRequest:
    """A request, its prompt for target and draft, and its grammar in the start state.

    The vision tower has not run yet.
    """

    request: Request
    prompt: Prompt
    grammar: GrammarState | None = None


PreprocessResult = PreparedRequest | Exception
"""Result of preprocessing: a prepared request, or the error that refused it."""


class PromptPreprocessor:
    """Makes prompts of requests by the rules and limits of one bundle; thread-safe."""

    def __init__(
        self,
        spec: TargetSpec,
        processor: Processor,
        limits: LimitsConfig,
        grammars: Callable[[], GrammarCompiler],
        device: str,
        *,
        digests: bool = False,
    ) -> None:
        """Create a preprocessor.

        ``grammars``: returns the compiler; called when a request has a grammar. ``digests``:
        compute digests of images and videos, for caches.
        """
        self._spec = spec
        self._processor = processor
        self._limits = limits
        self._grammars = grammars
        self._device = device
        self._digests = digests

    def run(self, request: Request, caller: Caller = NO_CALLER) -> PreprocessResult:
        """Prepare ``request``; an error is returned, not raised."""
        try:
            caller.check()
            _check_ids(request.sampling, self._spec.vocab_size)
            grammar = self._grammar(request.sampling, caller)
            prompt = self.prompt(self.model_inputs(request, caller), request.client)
            return PreparedRequest(request, prompt, grammar)
        except BaseException as error:  # reported to the reader; must not end this thread
            return as_failure(error)

    def may_wait(self, request: Request) -> bool:
        """Return whether preparing ``request`` may take long: images, videos or a new grammar."""
        grammar = request.sampling.grammar
        return request.has_media or (grammar is not None and not self._grammars().knows(grammar))

    def _grammar(self, sampling: SamplingParams, caller: Caller) -> GrammarState | None:
        if sampling.grammar is None:
            return None
        return self._grammars().state(
            sampling.grammar,
            caller,
            min_tokens=sampling.min_tokens,
            ignore_eos=sampling.ignore_eos,
        )

    def model_inputs(self, request: Request, caller: Caller = NO_CALLER) -> ModelInputs:
        """Return tokens, positions and patches, checked against the bundle's limits.

        Raises:
            UserError: the prompt is invalid or too large.
            RequestCancelledError: ``caller`` left.
        """
        processor, limits = self._processor, self._limits
        match request.prompt:
            case str() as text:
                inputs = processor.prompt(text, request.images, request.videos, caller=caller)
            case RawPrompt(content):
                inputs = processor.raw(content, caller)
            case Conversation() as asked:
                inputs = processor.messages(
                    asked.messages,
                    caller,
                    tools=asked.offered,
                    options=asked.template_options,
                    ending=asked.ending,
                )
            case messages:
                inputs = processor.messages(messages, caller)
        num_visual = int(inputs.visual_rows.sum())
        if num_visual > limits.max_visual_tokens:
            raise UserError(
                f"prompt: {num_visual} visual tokens, this bundle takes "
                f"{limits.max_visual_tokens}. Send fewer or smaller images, or rebuild with a "
                "larger limits.max_visual_tokens."
            )
        return inputs

    def prompt(self, inputs: ModelInputs, client: str = "") -> Prompt:
        """Make the prompt for target and draft. ``client``: as in ``Request``."""
        visuals = inputs.visuals
        media: tuple[tuple[bytes, int], ...] = ()
        if visuals and self._digests:
            media = media_digests(visuals, self._spec.require_vision().spatial_merge_size ** 2)
        if self._device == "cuda":  # pinned here, so that the decoding thread does not copy them
            visuals = tuple(visual.pinned() for visual in visuals)
        return Prompt(
            token_ids=inputs.token_ids,
            position_ids=inputs.position_ids,
            rope_delta=inputs.rope_delta,
            visual_rows=inputs.visual_rows,
            media=media,
            visuals=visuals,
            client=client,
        )


def _check_ids(sampling: SamplingParams, vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary."""
    for field in ("logit_bias", "stop_token_ids"):
        wrong = [token for token in getattr(sampling, field) if not 0 <= token < vocab_size]
        if wrong:
            raise UserError(
                f"{field}: expected token ids from 0 to {vocab_size - 1}, got {wrong[0]}"
            )


class PreprocessStage:
    """A preprocessor with two queues and their threads: texts, and requests that may wait."""

    def __init__(self, preprocessor: PromptPreprocessor, max_waiting: int) -> None:
        """Create the stage.

        ``max_waiting``: number of requests that may wait at once for a remote host, or for the
        processes that decode images and try grammars.
        """
        self._preprocessor = preprocessor
        self._lock = threading.Lock()
        self._num_texts = 0
        self._progress = Stopwatch()
        self._texts = ThreadPoolExecutor(_TOKENISING, "trt-eagle3-prepare")
        self._others = ThreadPoolExecutor(max_waiting, "trt-eagle3-prepare")

    @property
    def seconds(self) -> float:
        """Seconds since a text was last prepared or, if later, the oldest arrived; 0 if idle."""
        return self._progress.seconds

    def submit(self, request: Request, caller: Caller) -> Future[PreprocessResult]:
        """Queue a request. The future never fails; its result may be an error.

        Raises:
            OverloadedError: no thread could be started.
        """
        if self._preprocessor.may_wait(request):
            return self._queue(self._others, request, caller)
        future = self._queue(self._texts, request, caller)
        self._count_text(1)
        future.add_done_callback(lambda _: self._count_text(-1))
        return future

    def _queue(
        self, pool: ThreadPoolExecutor, request: Request, caller: Caller
    ) -> Future[PreprocessResult]:
        try:
            return pool.submit(self._preprocessor.run, request, caller)
        except RuntimeError as error:
            raise OverloadedError(
                f"no thread starts to prepare the request ({clip(error)}). Try again later."
            ) from error

    def _count_text(self, change: int) -> None:
        """Count a text that arrived (1) or is prepared (-1)."""
        with self._lock:
            self._num_texts += change
            if not self._num_texts:
                self._progress.stop()
            elif change < 0 or not self._progress.runs:
                self._progress.start()

    def close(self) -> None:
        """Accept no more requests. Queued requests still get a result."""
        for pool in (self._texts, self._others):
            pool.shutdown(wait=False)
