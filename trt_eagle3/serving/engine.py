"""Define the engine interface of a server; the engine may run in another process."""

from __future__ import annotations

from typing import Protocol

from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.decode.metrics import EngineMetrics
from trt_eagle3.decode.request.answer import Answer
from trt_eagle3.decode.request.request import PromptSource, Request
from trt_eagle3.multimodal import ModelInputs
from trt_eagle3.multimodal.caller import Caller

__all__ = ["Engine"]


class Engine(Protocol):
    """``decode.llm.LLM``, or the process that runs one (``engine_process``)."""

    @property
    def bundle(self) -> LoadedBundle:
        """The served bundle."""
        ...

    @property
    def ready(self) -> bool:
        """Whether the engine accepts requests."""
        ...

    def submit(self, request: Request) -> Answer:
        """Start answering; errors are raised by the answer, or by this call."""
        ...

    def prepare(self, prompt: PromptSource, *, caller: Caller) -> ModelInputs:
        """Return the tokens of a prompt."""
        ...

    def metrics(self) -> EngineMetrics:
        """Return the counters so far; may block."""
        ...

    def stall(self, max_step_s: float) -> str | None:
        """Describe why the engine seems to hang, or return None. Returns at once.

        It hangs if for ``max_step_s`` it had work and finished no step, prepared no prompt, or did
        not answer.
        """
        ...

    def count_rejected(self) -> None:
        """Count a request that the server refused."""
        ...

    def close(self) -> None:
        """Cancel requests in flight, and accept no more."""
        ...
