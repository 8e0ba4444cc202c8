"""Speculative decoding engines for Qwen3-VL and Qwen3 with EAGLE-3 drafts.

Build a bundle once, from a target and a draft in Hugging Face's layouts:

    >>> import trt_eagle3
    >>> trt_eagle3.build(trt_eagle3.load_config("pair.yaml"))

Then generate answers with it. A ``with`` block closes it:

    >>> from trt_eagle3 import LLM, SamplingParams
    >>> with LLM("engines/qwen3-vl-2b") as llm:
    ...     print(llm.generate("What is in this image?", images=["photo.jpg"]).text)
    ...     sampling = SamplingParams(temperature=0.7, max_tokens=100)
    ...     answers = llm.generate(["What is 2 plus 3?", "And 3 plus 4?"], sampling=sampling)
    ...     for chunk in llm.stream("Tell me a story."):
    ...         print(chunk.text, end="")

In an event loop: ``async for chunk in llm.astream(prompt)``. A prompt is a text, or a list of chat
messages. A user's mistake raises a ``UserError`` of one line.

Generating:
    LLM, load: load a bundle and generate answers.
    SamplingParams: how tokens are sampled, and when an answer ends. Grammar, StructuralTag: the
    form of an answer. TokenLogprob: log-probability of a token. PromptLogprobs, Logprob: those of
    a prompt.
    Generation: a complete answer. Answer: a stream of chunks. Chunk: the part of one step.
    Conversation, RawPrompt: prompts with tools, or without a chat template. ChatAnswer,
    AssistantMessage: results of ``LLM.chat``.
    Request: a prompt and its options, for ``LLM.submit``. Messages: a conversation.
    Video, ImageSource, VideoSource: images and videos of a prompt. MediaPolicy: their allowed
    sources. MediaCacheSizes: how much of them is kept for later prompts.
    EngineMetrics, Histogram: counters of a running LLM.
Building and validating:
    BuildConfig, load_config: the build configuration. build, BuildReport: build a bundle.
    validate: compare a bundle with PyTorch.
Errors (all derive from ``TrtEagle3Error``):
    UserError, OverloadedError, ClosedError, RequestCancelledError, EngineFailedError,
    DeviceMemoryError, EnvironmentMissingError, CheckFailedError.

Names are imported at first use: ``import trt_eagle3`` alone loads no torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers take it as True; importing ``typing`` would be slow

if TYPE_CHECKING:
    from trt_eagle3.config import BuildConfig, load_config
    from trt_eagle3.decode.llm import LLM, load
    from trt_eagle3.decode.metrics import EngineMetrics, Histogram
    from trt_eagle3.decode.request.answer import Answer
    from trt_eagle3.decode.request.chat import ChatAnswer
    from trt_eagle3.decode.request.conversation import Conversation, RawPrompt
    from trt_eagle3.decode.request.request import (
        Chunk,
        FinishReason,
        Generation,
        Messages,
        Request,
    )
    from trt_eagle3.decode.sampling.grammar import Grammar, StructuralTag
    from trt_eagle3.decode.sampling.logprobs import TokenLogprob
    from trt_eagle3.decode.sampling.prompt_logprobs import Logprob, PromptLogprobs
    from trt_eagle3.decode.sampling.sampling_params import SamplingOptions, SamplingParams
    from trt_eagle3.errors import (
        CheckFailedError,
        ClosedError,
        DeviceMemoryError,
        EngineFailedError,
        EnvironmentMissingError,
        OverloadedError,
        RequestCancelledError,
        TrtEagle3Error,
        UserError,
    )
    from trt_eagle3.multimodal.assistant_message import AssistantMessage
    from trt_eagle3.multimodal.image import ImageSource
    from trt_eagle3.multimodal.media_cache import MediaCacheSizes
    from trt_eagle3.multimodal.policy import MediaPolicy
    from trt_eagle3.multimodal.video import Video, VideoSource
    from trt_eagle3.parity.run import validate
    from trt_eagle3.pipeline import BuildReport, build

__all__ = [
    "LLM",
    "Answer",
    "AssistantMessage",
    "BuildConfig",
    "BuildReport",
    "ChatAnswer",
    "Chunk",
    "ClosedError",
    "Conversation",
    "DeviceMemoryError",
    "EngineFailedError",
    "EngineMetrics",
    "EnvironmentMissingError",
    "FinishReason",
    "CheckFailedError",
    "Generation",
    "Grammar",
    "Histogram",
    "ImageSource",
    "MediaCacheSizes",
    "MediaPolicy",
    "Logprob",
    "Messages",
    "OverloadedError",
    "PromptLogprobs",
    "RawPrompt",
    "Request",
    "RequestCancelledError",
    "SamplingOptions",
    "SamplingParams",
    "StructuralTag",
    "TokenLogprob",
    "TrtEagle3Error",
    "UserError",
    "Video",
    "VideoSource",
    "build",
    "load",
    "load_config",
    "validate",
]

_HOMES = {
    "config": ("BuildConfig", "load_config"),
    "decode.request.answer": ("Answer",),
    "decode.request.chat": ("ChatAnswer",),
    "decode.request.conversation": ("Conversation", "RawPrompt"),
    "decode.sampling.grammar": ("Grammar", "StructuralTag"),
    "decode.llm": ("LLM", "load"),
    "decode.metrics": ("EngineMetrics", "Histogram"),
    "decode.request.request": (
        "Chunk",
        "FinishReason",
        "Generation",
        "Messages",
        "Request",
    ),
    "decode.sampling.logprobs": ("TokenLogprob",),
    "decode.sampling.prompt_logprobs": ("Logprob", "PromptLogprobs"),
    "decode.sampling.sampling_params": ("SamplingOptions", "SamplingParams"),
    "errors": (
        "ClosedError",
        "DeviceMemoryError",
        "EngineFailedError",
        "EnvironmentMissingError",
        "CheckFailedError",
        "OverloadedError",
        "RequestCancelledError",
        "TrtEagle3Error",
        "UserError",
    ),
    "multimodal.assistant_message": ("AssistantMessage",),
    "multimodal.image": ("ImageSource",),
    "multimodal.media_cache": ("MediaCacheSizes",),
    "multimodal.policy": ("MediaPolicy",),
    "multimodal.video": ("Video", "VideoSource"),
    "parity.run": ("validate",),
    "pipeline": ("BuildReport", "build"),
}


if not TYPE_CHECKING:  # hidden from type checkers, so that they reject unknown names

    def __getattr__(name: str) -> object:
        """Import ``name`` from its module, once."""
        from importlib import import_module

        for home, names in _HOMES.items():
            if name in names:
                found = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
