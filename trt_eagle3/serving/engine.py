"""What a server asks of an engine, wherever that runs."""

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
    """``decode.llm.LLM``, or the process that has one (``engine_process``)."""

    @property
    def bundle(self) -> LoadedBundle:
        """What is served."""
        ...

    @property
    def ready(self) -> bool:
        """Whether requests would be answered."""
        ...

    def submit(self, request: Request) -> Answer:
        """Start answering; what is wrong comes out of the answer, or of this call."""
        ...

    def prepare(self, prompt: PromptSource, *, caller: Caller) -> ModelInputs:
        """The tokens of a prompt."""
        ...

    def metrics(self) -> EngineMetrics:
        """Counters so far; whoever asks may wait for them."""
        ...

    def stall(self, max_step_s: float) -> str | None:
        """Why the engine seems to hang: it has had work for ``max_step_s`` and finished no step, or
        prepared no prompt, or has not answered for so long. None: it works. Returns at once.
        """
        ...

    def count_rejected(self) -> None:
        """Count a request that the server has refused."""
        ...

    def close(self) -> None:
        """Cancel what is in flight, and take nothing more."""
        ...
