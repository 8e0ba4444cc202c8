"""LLM: generate answers with a loaded bundle."""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
import logging
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, Never, Self, Unpack, cast, overload

from tokenizers import Tokenizer

from trt_eagle3.decode.core import EngineCore
from trt_eagle3.decode.forward.chunks import MAX_STEP_MS
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.decode.metrics import EngineMetrics, Meter, stall_of
from trt_eagle3.decode.policy.protocol import Policy
from trt_eagle3.decode.request.answer import Answer
from trt_eagle3.decode.request.chat import (
    ChatAnswer,
    ChatOptions,
    ChatTools,
    are_conversations,
    chat_request,
)
from trt_eagle3.decode.request.request import Chunk, Generation, Messages, PromptInput, Request
from trt_eagle3.decode.request.request_list import (
    Images,
    Sampling,
    Videos,
    chosen_sampling,
    is_one_prompt,
    one_request,
    repeated,
    requests_of,
)
from trt_eagle3.decode.sampling.sampling_params import (
    GREEDY,
    SamplingOptions,
    SamplingParams,
    check_options,
)
from trt_eagle3.errors import ClosedError, OverloadedError, UserError, clip
from trt_eagle3.io.vllm_names import called_in_python
from trt_eagle3.multimodal import (
    LOCAL_MEDIA,
    MediaPolicy,
    ModelInputs,
)
from trt_eagle3.multimodal.caller import NO_CALLER, Caller
from trt_eagle3.multimodal.media_cache import MEDIA_CACHE, MediaCacheSizes

__all__ = ["LLM", "load"]

_log = logging.getLogger("trt_eagle3")


def load(
    bundle: str | Path,
    *,
    draft: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    cache: str | Path | None = None,
    media: MediaPolicy = LOCAL_MEDIA,
    media_cache: MediaCacheSizes = MEDIA_CACHE,
    split_special_tokens: bool | None = None,
    tool_format: str = "auto",
    prefix_cache: bool | None = None,
    tensor_parallel: int | None = None,
    max_step_ms: float = MAX_STEP_MS,
    **unknown: Never,
) -> LLM:
    """Load a bundle: the same as ``LLM(bundle)``, under a common name.

    ``unknown``: refused, by name.

    Raises:
        UserError: as for ``LLM``.
    """
    return LLM(
        bundle,
        draft=draft,
        settings=settings,
        cache=cache,
        media=media,
        media_cache=media_cache,
        split_special_tokens=split_special_tokens,
        tool_format=tool_format,
        prefix_cache=prefix_cache,
        tensor_parallel=tensor_parallel,
        max_step_ms=max_step_ms,
        **unknown,
    )


class LLM:
    """A bundle that answers prompts; thread-safe, and a context manager that closes itself.

    ```python
    with LLM("engines/qwen3-vl-2b") as llm:
        answer = llm.generate("What is in this image?", images=["photo.jpg"])
        print(answer.text)
        for chunk in llm.stream("Write a poem.", temperature=0.7, max_tokens=100):
            print(chunk.text, end="")
    ```

    Concurrent calls share batches. Graphs are opened at first use: a text prompt never loads the
    vision tower.

    Attributes:
        bundle: the loaded bundle: record, target, draft, limits, processor.
    """

    def __new__(cls, *_: Any, **options: Any) -> Self:
        """Refuse unknown arguments with a UserError; ``__init__`` alone would raise TypeError."""
        _check_arguments(options, list(inspect.signature(cls.__init__).parameters)[1:])
        return super().__new__(cls)

    def __init__(
        self,
        bundle: str | Path | LoadedBundle,
        *,
        draft: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        cache: str | Path | None = None,
        media: MediaPolicy = LOCAL_MEDIA,
        media_cache: MediaCacheSizes = MEDIA_CACHE,
        split_special_tokens: bool | None = None,
        tool_format: str = "auto",
        prefix_cache: bool | None = None,
        tensor_parallel: int | None = None,
        max_step_ms: float = MAX_STEP_MS,
    ) -> None:
        """Read and check a bundle, a folder that ``build`` wrote.

        In place of a bundle, a checkpoint (a folder or a Hub id) is built into a cache folder, and
        reused while nothing changes (``bundle_cache.bundle_of``).

        Args:
            draft, settings, cache: with a checkpoint only: the draft's checkpoint; keys of the
                build config, such as ``{"engine": {"dtype": "float16"}}``; the cache folder.
            media: allowed sources of images and videos in prompts.
            media_cache: what is kept of them for later prompts: ``MediaCacheSizes(0, 0, 0)``:
                nothing. Answers are the same.
            split_special_tokens: whether control tokens in the text of prompts are plain text;
                None: as the bundle was built.
            tool_format: format of tool calls: ``hermes``, ``qwen3_xml``, ``llama3_json``, or
                ``auto``, the format of the checkpoint's chat template.
            prefix_cache: keep KV pages of past prompts for prompts with the same prefix; None: as
                the bundle was built.
            tensor_parallel: devices of this machine that share the target: 1, 2, 4 or 8. On CUDA
                these are the first visible GPUs. None: as the bundle was built.
            max_step_ms: target for the time between two tokens of an answer while prompts of other
                requests are prefilled: a prefill has as many rows as fit. Only where a warm-up has
                measured the costs, as ``capture_graphs`` does on a GPU.
        Raises:
            UserError: the bundle is missing, unfinished, damaged or of another schema version, or
                its limits do not fit this GPU; or an argument is unknown. One of vLLM's names is
                answered with the name here.
        """
        if isinstance(max_step_ms, bool) or not 0 < max_step_ms < inf:
            raise UserError(f"max_step_ms: expected milliseconds above 0, got {max_step_ms!r:.40}")
        if not isinstance(bundle, LoadedBundle):
            from trt_eagle3.bundle_cache import bundle_of  # a layer above: it builds

            bundle = LoadedBundle.open(
                bundle_of(bundle, draft, settings, cache=cache, announce=_log.info),
                media=media,
                media_cache=media_cache,
                split_special_tokens=split_special_tokens,
                tool_format=tool_format,
                tensor_parallel=tensor_parallel,
            )
        self.bundle = bundle
        self._max_step_ms = max_step_ms
        self._prefix_cache = bundle.limits.prefix_cache if prefix_cache is None else prefix_cache
        digests = self._prefix_cache or bundle.media_cache.keeps_embeddings
        self._preprocessor = bundle.preprocessor(digests=digests)
        self._meter = Meter(bundle.record.config.speculation.acceptance_floor)
        self._core: EngineCore | None = None
        self._closed = False
        self._starting = threading.Lock()
        self._on_death: Callable[[], object] = lambda: None

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts
        self,
        prompt: PromptInput,
        sampling: SamplingParams | None = None,
        *,
        images: Images = None,
        videos: Videos = None,
        n: None = None,
        sampling_params: SamplingParams | None = None,
        speculation: bool = True,
        **options: Unpack[SamplingOptions],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: Sequence[PromptInput],
        sampling: Sampling | None = None,
        *,
        images: Sequence[Images] | None = None,
        videos: Sequence[Videos] | None = None,
        n: None = None,
        sampling_params: Sampling | None = None,
        speculation: bool = True,
        **options: Unpack[SamplingOptions],
    ) -> list[Generation]: ...

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts
        self,
        prompt: PromptInput,
        sampling: SamplingParams | None = None,
        *,
        images: Images = None,
        videos: Videos = None,
        n: int,
        sampling_params: SamplingParams | None = None,
        speculation: bool = True,
        **options: Unpack[SamplingOptions],
    ) -> list[Generation]: ...

    @overload
    def generate(
        self,
        prompt: Sequence[PromptInput],
        sampling: Sampling | None = None,
        *,
        images: Sequence[Images] | None = None,
        videos: Sequence[Videos] | None = None,
        n: int,
        sampling_params: Sampling | None = None,
        speculation: bool = True,
        **options: Unpack[SamplingOptions],
    ) -> list[list[Generation]]: ...

    def generate(
        self,
        prompt: PromptInput | Sequence[PromptInput],
        sampling: Sampling | None = None,
        *,
        images: Images | Sequence[Images] = None,
        videos: Videos | Sequence[Videos] = None,
        n: int | None = None,
        sampling_params: Sampling | None = None,
        speculation: bool = True,
        **options: Unpack[SamplingOptions],
    ) -> Generation | list[Generation] | list[list[Generation]]:
        """Answer a prompt, or a list of prompts in batches.

        Args:
            prompt: a user's text, a list of chat messages, token ids (a list of integers, or
                ``{"prompt_token_ids": [...]}``), or a list of any of these.
            images, videos: images and videos before a text, a list or a single one. For a list of
                prompts, one such entry per prompt, or None. Chat messages contain their own.
            sampling: how tokens are sampled and when answers end. For a list of prompts, one for
                all or one per prompt. None: greedy.
            n: number of answers to each prompt. Their seeds are ``seed``, ``seed + 1`` and so on,
                or drawn ones. Greedy answers are equal.
            sampling_params: another name of ``sampling``.
            speculation: use the bundle's draft. The answer is the same (when sampled, the same
                distribution), but faster.
            options: fields of ``SamplingParams``; they override those in ``sampling``.
        Returns:
            The result; for a list of prompts a list, in the same order. With ``n``, a list of ``n``
            in place of each.
        Raises:
            UserError: a prompt or an option is invalid; the other prompts are cancelled.
            OverloadedError: ``limits.max_waiting`` requests of other callers wait already.
            ClosedError: the LLM is closed.
        """
        given = chosen_sampling(sampling, sampling_params)
        if is_one_prompt(prompt):
            request = one_request(prompt, images, videos, given, speculation, options)
            if n is None:
                return self.submit(request).finish()
            return self._generate_each([request], n)[0]
        prompts = cast(Sequence[PromptInput], prompt)
        requests = requests_of(prompts, images, videos, given, speculation, options)
        if n is None:
            return self._generate_all(requests)
        return self._generate_each(requests, n)

    @overload
    def chat(
        self,
        messages: Messages,
        sampling: SamplingParams | None = None,
        *,
        n: None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatAnswer: ...

    @overload
    def chat(
        self,
        messages: Messages,
        sampling: SamplingParams | None = None,
        *,
        n: int,
        **options: Unpack[ChatOptions],
    ) -> list[ChatAnswer]: ...

    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        sampling: SamplingParams | None = None,
        *,
        n: None = None,
        **options: Unpack[ChatOptions],
    ) -> list[ChatAnswer]: ...

    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        sampling: SamplingParams | None = None,
        *,
        n: int,
        **options: Unpack[ChatOptions],
    ) -> list[list[ChatAnswer]]: ...

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling: SamplingParams | None = None,
        *,
        n: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
        template_options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        sampling_params: SamplingParams | None = None,
        speculation: bool = True,
        **options: Unpack[SamplingOptions],
    ) -> ChatAnswer | list[ChatAnswer] | list[list[ChatAnswer]]:
        """Answer a conversation, or each of a list, and parse reasoning and tool calls.

        Args:
            messages: as of OpenAI's chat completions, or a list of such conversations, which is
                answered in batches.
            n: number of answers to each conversation, as for ``generate``.
            tools, tool_choice, parallel_tool_calls, template_options: see
                ``decode.request.chat.ChatTools``.
            add_generation_prompt, continue_final_message: how the prompt ends, see
                ``decode.request.conversation.Conversation``.
        Raises:
            UserError, OverloadedError, ClosedError: as for ``generate``.
        """
        check_options(options, [*ChatOptions.__optional_keys__, "n"])
        given = chosen_sampling(sampling, sampling_params)
        if not isinstance(given, SamplingParams):
            raise UserError(f"sampling: expected SamplingParams, got {type(given).__name__}")
        conversations = messages if are_conversations(messages) else [cast(Messages, messages)]
        asked = ChatTools(
            tools,
            tool_choice,
            parallel_tool_calls,
            template_options,
            add_generation_prompt,
            continue_final_message,
        )
        chosen, processor = given.updated(**options), self.bundle.processor
        pairs = [
            chat_request(one, asked, chosen, processor, speculation=speculation)
            for one in conversations
        ]
        found = self._generate_each([request for request, _ in pairs], 1 if n is None else n)
        answers = [
            [parse(generation) for generation in generations]
            for (_, parse), generations in zip(pairs, found, strict=True)
        ]
        if n is not None:
            return answers if are_conversations(messages) else answers[0]
        firsts = [first for [first] in answers]
        return firsts if are_conversations(messages) else firsts[0]

    def stream(
        self,
        prompt: PromptInput,
        sampling: SamplingParams | None = None,
        *,
        images: Images = None,
        videos: Videos = None,
        sampling_params: SamplingParams | None = None,
        speculation: bool = True,
        **options: Unpack[SamplingOptions],
    ) -> Answer:
        """Start to answer a prompt in chunks; returns at once. Arguments: as for ``generate``.

        Returns:
            An iterator of ``Chunk``s; leaving it before the end cancels the request. Its
            ``generation`` is the result so far.
        """
        given = chosen_sampling(sampling, sampling_params)
        return self.submit(one_request(prompt, images, videos, given, speculation, options))

    async def astream(
        self,
        prompt: PromptInput,
        sampling: SamplingParams | None = None,
        *,
        images: Images = None,
        videos: Videos = None,
        sampling_params: SamplingParams | None = None,
        speculation: bool = True,
        **options: Unpack[SamplingOptions],
    ) -> AsyncGenerator[Chunk]:
        """Answer a prompt in pieces, for ``async for``; the event loop waits for nothing."""
        given = chosen_sampling(sampling, sampling_params)
        request = one_request(prompt, images, videos, given, speculation, options)
        await asyncio.to_thread(self._started)
        async with aclosing(aiter(self.submit(request))) as chunks:
            async for chunk in chunks:
                yield chunk

    def submit(
        self,
        request: Request | PromptInput,
        sampling: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Answer:
        """Start answering ``request`` along with all others; thread-safe, and back at once.

        Args:
            request: a ``Request``, which holds its own sampling; or a prompt, as for ``stream``.

        The answer is an iterator, plain or asynchronous, of ``Chunk``s; it raises what is wrong
        with the prompt.

        Raises:
            UserError: an unknown option; or sampling beside a ``Request``.
            OverloadedError: ``limits.max_waiting`` requests wait already.
            ClosedError: the LLM is closed.
        """
        if not isinstance(request, Request):
            given = chosen_sampling(sampling, sampling_params)
            request = one_request(request, None, None, given, True, options)
        elif options or sampling is not None or sampling_params is not None:
            raise UserError("sampling: a Request holds its own. Set Request(sampling=...).")
        return self._started().submit(request, keeps=self)

    def prepare(
        self,
        prompt: PromptInput,
        images: Images = None,
        videos: Videos = None,
        caller: Caller = NO_CALLER,
    ) -> ModelInputs:
        """Return tokens, positions and patches of a prompt, checked against the bundle's limits.

        Args:
            caller: the client's name, and whether it still waits.
        Raises:
            UserError: the prompt is invalid or too large.
            RequestCancelledError: ``caller`` left.
        """
        request = one_request(prompt, images, videos, GREEDY, True, {})
        return self._preprocessor.model_inputs(request, caller)

    def start(self) -> None:
        """Open all graphs now, and load what the first text and the first image need.

        Without this, target and draft are opened at the first request, and the vision tower at the
        first image. No CUDA graph is captured: see ``capture_graphs``.

        Raises:
            ClosedError: the LLM is closed. EngineFailedError: the engine failed.
            UserError, EnvironmentMissingError: the tower or a process cannot be opened.
        """
        self._check_open()
        decoders = self.bundle.processor.decoders
        if self.bundle.spec.vision is not None and decoders is not None:
            decoders.start_one()  # it is ready before the graphs are
        self._started().open_tower()

    def capture_graphs(self, seconds: float = 30.0) -> int:
        """Capture the CUDA graphs of decoding now for every batch size.

        If no request is running, it also runs images and prompts of every size.

        Args:
            seconds: time limit of the captures of decoding. Other shapes are captured in use, at
                their third run.
        Returns:
            Number of batch sizes that are ready; 0 if no graphs are captured, as on the CPU.
        Raises:
            ClosedError: the LLM is closed, or was closed before this began. EngineFailedError: the
                engine failed meanwhile.
        """
        return self._started().capture_graphs(seconds)

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, a ``tokenizers.Tokenizer``: ``encode``, ``decode``, ids.

        Do not change it; requests use the same object.
        """
        return self.bundle.processor.tokenizer

    @property
    def ready(self) -> bool:
        """Whether the LLM accepts requests."""
        return not self._closed and (self._core is None or self._core.alive)

    @property
    def step_seconds(self) -> float:
        """Seconds of the current step so far; 0 while there is no work.

        Reading it never blocks, so it also shows a step that hangs.
        """
        return 0.0 if self._core is None else self._core.step_seconds

    def stall(self, max_step_s: float) -> str | None:
        """Describe a step or a wait for prepared prompts longer than ``max_step_s``; else None."""
        return stall_of(self.step_seconds, self._prepare_seconds, max_step_s)

    @property
    def _prepare_seconds(self) -> float:
        return 0.0 if self._core is None else self._core.prepare_seconds

    def use_policy(self, policy: Policy) -> None:
        """Replace the bundle's speculation policy. Do not call it while requests are in flight."""
        self._started().use_policy(policy)

    def metrics(self) -> EngineMetrics:
        """Return counters of all requests so far, without opening any graph."""
        return self._meter.snapshot(self.step_seconds, self._prepare_seconds, **self._now())

    def on_death(self, call: Callable[[], object]) -> None:
        """Call ``call`` if the engine fails later; on any thread. Before the first request only."""
        assert self._core is None, "the engine runs already"
        self._on_death = call

    def count_rejected(self) -> None:
        """Count a request that the server refused as invalid before it reached the LLM."""
        self._meter.finished("rejected")

    def restart_metrics(self) -> None:
        """Reset all counters. Do not call it while requests are in flight."""
        self._meter.restart()
        self.bundle.processor.images.restart_counts()
        if self._core is not None:
            self._core.restart_counts()

    def close(self, *, drain: bool = False) -> None:
        """Stop accepting requests, and end.

        Requests in flight are cancelled, or with ``drain`` answered first.
        """
        self._close_core(drain=drain)
        self.bundle.close_ranks()
        self.bundle.grammars.close()
        if self.bundle.processor.decoders is not None:
            self.bundle.processor.decoders.close()

    def _close_core(self, *, drain: bool = False) -> None:
        with self._starting:
            self._closed, core = True, self._core
        if core is not None:
            core.close(drain=drain)

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
        """Return the core; the first call creates it."""
        with self._starting:
            self._check_open()
            if self._core is None:
                self._core = EngineCore(
                    self.bundle,
                    self._preprocessor,
                    self._meter,
                    prefix_cache=self._prefix_cache,
                    on_death=self._on_death,
                    max_step_ms=self._max_step_ms,
                )
                weakref.finalize(self, _end, self._core, self.bundle)
            return self._core

    def _now(self) -> dict[str, int]:
        """Return the current state that the meter does not count."""
        images = self.bundle.processor.images
        kept = {
            "image_hits": images.num_hits,
            "image_misses": images.num_misses,
            "image_bytes": images.num_bytes,
        }
        if self._core is not None:
            return {**self._core.now(), **kept}
        return {**EngineCore.idle(self.bundle), **kept}

    def _generate_each(self, requests: Sequence[Request], n: int) -> list[list[Generation]]:
        """Answer each of ``requests`` ``n`` times."""
        found = self._generate_all([one for request in requests for one in repeated(request, n)])
        return [found[i : i + n] for i in range(0, len(found), n)]

    def _generate_all(self, requests: Sequence[Request]) -> list[Generation]:
        """Answer ``requests``; as many are submitted at once as may wait."""
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
        """Submit ``request``; if too many wait, first wait for the oldest answer in ``before``."""
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


def _end(core: EngineCore, bundle: LoadedBundle) -> None:
    """Close what an LLM that is no longer referenced has left open."""
    core.close()
    bundle.close_ranks()


def _check_arguments(options: Mapping[str, object], known: Sequence[str]) -> None:
    """Refuse the first of ``options`` that is not ``known``."""
    for name in options:
        if name in known:
            continue
        if ours := called_in_python(name):
            raise UserError(f"{name}: vLLM's name; {ours}")
        near = difflib.get_close_matches(name[:40].lower(), known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserError(f"{clip(name, 40)}: unknown argument.{hint} Arguments: {', '.join(known)}")


# ``help`` and editors show the arguments of ``__init__``, not those of ``__new__``
functools.update_wrapper(LLM.__new__, LLM.__init__, assigned=())
