"""LLM: a loaded bundle that answers prompts."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, cast, overload

from trt_eagle3.decode.core import EngineCore
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.decode.metrics import EngineMetrics, Meter, stall_of
from trt_eagle3.decode.policy.protocol import Policy
from trt_eagle3.decode.request.answer import Answer
from trt_eagle3.decode.request.chat import ChatAnswer, ChatTools, chat_request
from trt_eagle3.decode.request.request import Chunk, Generation, Messages, PromptSource, Request
from trt_eagle3.decode.request.request_list import (
    Images,
    Videos,
    is_one_prompt,
    one_request,
    requests_of,
)
from trt_eagle3.decode.sampling.sampling_params import GREEDY, SamplingOptions, SamplingParams
from trt_eagle3.errors import ClosedError, OverloadedError
from trt_eagle3.multimodal import (
    LOCAL_MEDIA,
    ImageSource,
    MediaPolicy,
    ModelInputs,
    VideoSource,
)
from trt_eagle3.multimodal.caller import NO_CALLER, Caller

__all__ = ["LLM", "load"]

_log = logging.getLogger("trt_eagle3")


def load(
    bundle: str | Path,
    *,
    draft: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    cache: str | Path | None = None,
    media: MediaPolicy = LOCAL_MEDIA,
    split_special_tokens: bool | None = None,
    tool_format: str = "auto",
) -> LLM:
    """Load a bundle: ``LLM(bundle)``, in a word that other libraries use.

    Raises:
        UserError: as for ``LLM``.
    """
    return LLM(
        bundle,
        draft=draft,
        settings=settings,
        cache=cache,
        media=media,
        split_special_tokens=split_special_tokens,
        tool_format=tool_format,
    )


class LLM:
    """A bundle that answers prompts; thread-safe, and a context manager that closes itself.

    ```python
    with LLM("engines/qwen3-vl-2b") as llm:
        answer = llm.generate("What is in this picture?", images=["photo.jpg"])
        print(answer.text)
        for chunk in llm.stream("And now a poem.", temperature=0.7, max_tokens=100):
            print(chunk.text, end="")
    ```

    Whoever asks meanwhile is answered in the same batches. Graphs are opened when they are first
    needed: a text prompt never loads the vision tower.

    Attributes:
        bundle: what was loaded: record, target, draft, limits, processor.
    """

    def __init__(
        self,
        bundle: str | Path | LoadedBundle,
        *,
        draft: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        cache: str | Path | None = None,
        media: MediaPolicy = LOCAL_MEDIA,
        split_special_tokens: bool | None = None,
        tool_format: str = "auto",
        prefix_cache: bool | None = None,
    ) -> None:
        """Read and check a bundle, a folder that ``build`` wrote.

        In place of a bundle, a checkpoint (a folder or a Hub id) is built into a cache folder, and
        reused while nothing changes (``bundle_cache.bundle_of``).

        Args:
            draft, settings, cache: with a checkpoint only: the draft's checkpoint; keys of the
                build config, such as ``{"engine": {"dtype": "float16"}}``; the cache folder.
            media: where images and videos of prompts may come from.
            split_special_tokens: whether control tokens in the text of prompts are text; None: as
                the bundle was built.
            tool_format: of tool calls: ``hermes``, ``qwen3_xml``, or ``auto``, the one that the
                checkpoint's chat template teaches.
            prefix_cache: keep KV pages of past prompts for prompts that begin alike; None: as the
                bundle was built.
        Raises:
            UserError: no bundle, an unfinished or damaged one, one of another schema version, or
                one whose limits do not fit this GPU.
        """
        if not isinstance(bundle, LoadedBundle):
            from trt_eagle3.bundle_cache import bundle_of  # a layer above: it builds

            bundle = LoadedBundle.open(
                bundle_of(bundle, draft, settings, cache=cache, announce=_log.info),
                media=media,
                split_special_tokens=split_special_tokens,
                tool_format=tool_format,
            )
        self.bundle = bundle
        self._prefix_cache = bundle.limits.prefix_cache if prefix_cache is None else prefix_cache
        self._preprocessor = bundle.preprocessor(digests=self._prefix_cache)
        self._meter = Meter(bundle.record.config.speculation.acceptance_floor)
        self._core: EngineCore | None = None
        self._closed = False
        self._starting = threading.Lock()

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts
        self,
        prompt: PromptSource,
        *,
        images: Images = None,
        videos: Videos = None,
        sampling: SamplingParams = GREEDY,
        speculation: bool = True,
        **options: Unpack[SamplingOptions],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: Sequence[PromptSource],
        *,
        images: Sequence[ImageSource | Images] | None = None,
        videos: Sequence[Videos] | None = None,
        sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
        speculation: bool = True,
        **options: Unpack[SamplingOptions],
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: PromptSource | Sequence[PromptSource],
        *,
        images: Sequence[ImageSource | Images] | None = None,
        videos: Sequence[VideoSource | Videos] | None = None,
        sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
        speculation: bool = True,
        **options: Unpack[SamplingOptions],
    ) -> Generation | list[Generation]:
        """Answer a prompt, or each of a list of prompts, in batches.

        Args:
            prompt: a user's text, a list of chat messages, or a list of either.
            images, videos: lists of those before a text; of a list of prompts, such a list for each
                prompt, or None, or a single image. Those of messages stand in the messages.
            sampling: how tokens are chosen and when answers end; of a list of prompts, one for
                all or one for each.
            speculation: draft with the bundle's draft: the same answer (when sampled, the same
                distribution), only faster.
            options: fields of ``SamplingParams``, in place of those in ``sampling``.
        Returns:
            What was generated; of a list of prompts a list, in their order.
        Raises:
            UserError: what is wrong with a prompt; the others of the list are cancelled.
            OverloadedError: ``limits.max_waiting`` requests of others wait already.
            ClosedError: this is closed.
        """
        if is_one_prompt(prompt):
            request = one_request(prompt, images, videos, sampling, speculation, options)
            return self.submit(request).finish()
        return self._generate_all(
            requests_of(
                cast(Sequence[PromptSource], prompt),
                images,
                videos,
                sampling,
                speculation,
                options,
            )
        )

    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
        template_options: Mapping[str, Any] | None = None,
        sampling: SamplingParams = GREEDY,
        speculation: bool = True,
        **options: Unpack[SamplingOptions],
    ) -> ChatAnswer:
        """Answer a conversation, and parse reasoning and calls of tools out of the answer.

        Args:
            messages: as of OpenAI's chat completions. tools and the next three: see
                ``decode.request.chat.ChatTools``.
        Raises:
            UserError, OverloadedError, ClosedError: as for ``generate``.
        """
        asked = ChatTools(tools, tool_choice, parallel_tool_calls, template_options)
        request, parser = chat_request(
            messages,
            asked,
            sampling.updated(**options),
            self.bundle.processor,
            speculation=speculation,
        )
        generation = self.submit(request).finish()
        parser.push(generation.text)
        parser.flush()
        return ChatAnswer(parser.message, generation)

    def stream(
        self,
        prompt: PromptSource,
        *,
        images: Images = None,
        videos: Videos = None,
        sampling: SamplingParams = GREEDY,
        speculation: bool = True,
        **options: Unpack[SamplingOptions],
    ) -> Answer:
        """Start answering a prompt: ``generate`` in pieces, and back at once.

        Returns:
            An iterator of ``Chunk``s; leaving it early cancels the request. Its ``generation``
            says what there is so far.
        """
        return self.submit(one_request(prompt, images, videos, sampling, speculation, options))

    async def astream(
        self,
        prompt: PromptSource,
        *,
        images: Images = None,
        videos: Videos = None,
        sampling: SamplingParams = GREEDY,
        speculation: bool = True,
        **options: Unpack[SamplingOptions],
    ) -> AsyncGenerator[Chunk]:
        """Answer a prompt in pieces, for ``async for``; the event loop waits for nothing."""
        request = one_request(prompt, images, videos, sampling, speculation, options)
        await asyncio.to_thread(self.start)
        async with aclosing(aiter(self.submit(request))) as chunks:
            async for chunk in chunks:
                yield chunk

    def submit(self, request: Request) -> Answer:
        """Start answering ``request`` along with all others; thread-safe, and back at once.

        The answer is an iterator, plain or asynchronous, of ``Chunk``s; it raises what is wrong
        with the prompt.

        Raises:
            OverloadedError: ``limits.max_waiting`` requests wait already.
            ClosedError: this is closed.
        """
        return self._started().submit(request, keeps=self)

    def prepare(
        self,
        prompt: PromptSource,
        images: Images = None,
        videos: Videos = None,
        caller: Caller = NO_CALLER,
    ) -> ModelInputs:
        """Tokens, positions and patches of a prompt, checked against the bundle's limits.

        Args:
            caller: who asks, and whether they still wait.
        Raises:
            UserError: what is wrong with the prompt.
            RequestCancelledError: ``caller`` left.
        """
        request = one_request(prompt, images, videos, GREEDY, True, {})
        return self._preprocessor.model_inputs(request, caller)

    def start(self) -> None:
        """Open the graphs now, rather than with the first request."""
        self._started()

    def capture_graphs(self, seconds: float = 30.0) -> int:
        """Run pictures and prompts of every size, where nothing is being answered, and capture the
        CUDA graphs of decoding for every batch size, rather than as they come.

        Args:
            seconds: that capturing may take; what does not fit is captured when it has come twice.
        Returns:
            How many batch sizes are ready; 0 where no graphs are captured, on the CPU.
        Raises:
            ClosedError: this is closed, or is so before it has begun. EngineFailedError: the engine
                ends meanwhile.
        """
        return self._started().capture_graphs(seconds)

    @property
    def ready(self) -> bool:
        """Whether requests would be answered."""
        return not self._closed and (self._core is None or self._core.alive)

    @property
    def step_seconds(self) -> float:
        """That the step under way has taken so far; 0 while there is no work. It waits for nothing,
        so it also tells of a step that hangs.
        """
        return 0.0 if self._core is None else self._core.step_seconds

    def stall(self, max_step_s: float) -> str | None:
        """Describe a step or a wait for prepared prompts beyond ``max_step_s``; else None."""
        return stall_of(self.step_seconds, self._prepare_seconds, max_step_s)

    @property
    def _prepare_seconds(self) -> float:
        return 0.0 if self._core is None else self._core.prepare_seconds

    def use_policy(self, policy: Policy) -> None:
        """Speculate by ``policy`` from now on, instead of the bundle's; not while requests are in
        flight.
        """
        self._started().use_policy(policy)

    def metrics(self) -> EngineMetrics:
        """Counters of all requests so far; looking opens no graphs."""
        return self._meter.snapshot(self.step_seconds, self._prepare_seconds, **self._now())

    def count_rejected(self) -> None:
        """Count a request that whoever serves this has refused itself, because it was wrong."""
        self._meter.finished("rejected")

    def restart_metrics(self) -> None:
        """Count requests from here on; not while any are in flight."""
        self._meter.restart()

    def close(self, *, drain: bool = False) -> None:
        """Take no more requests; those in flight are cancelled, or with ``drain`` answered
        first.
        """
        with self._starting:
            self._closed, core = True, self._core
        if core is not None:
            core.close(drain=drain)
        self.bundle.grammars.close()
        if self.bundle.processor.decoders is not None:
            self.bundle.processor.decoders.close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({str(self.bundle.path)!r}{', closed' if self._closed else ''})"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.bundle.path}: this LLM is closed. Load it again.")

    def _started(self) -> EngineCore:
        """The core, begun once by whoever asks first."""
        with self._starting:
            self._check_open()
            if self._core is None:
                self._core = EngineCore(
                    self.bundle, self._preprocessor, self._meter, prefix_cache=self._prefix_cache
                )
                weakref.finalize(self, self._core.close)
            return self._core

    def _now(self) -> dict[str, int]:
        """What the counters do not count."""
        if self._core is not None:
            return self._core.now()
        return EngineCore.idle(self.bundle)

    def _generate_all(self, requests: Sequence[Request]) -> list[Generation]:
        """Answer ``requests``, as many at once as may wait."""
        answers: list[Answer] = []
        unfinished: deque[Answer] = deque()
        try:
            for request in requests:
                answers.append(self._submit_in_turn(request, unfinished))
                unfinished.append(answers[-1])
            return [answer.finish() for answer in answers]
        except BaseException:
            for answer in answers:
                answer.cancel()
            raise

    def _submit_in_turn(self, request: Request, before: deque[Answer]) -> Answer:
        """Submit ``request``; where too many wait, once the oldest of those ``before`` it is
        over.
        """
        while True:
            try:
                answer = self.submit(request)
            except OverloadedError:
                if not before or self._closed:
                    raise
                before.popleft().wait()
            else:
                answer.read_at_end()
                return answer
