"""vLLM's offline ``LLM``, stepped so that ``concurrency`` requests are always in flight.

Prefix caching and the cache of prepared images are off, as on our side: repeated questions are
computed again. To start in one minute instead of several, fewer CUDA graph sizes are captured,
including all measured sizes, and image profiling is skipped. Everything else is vLLM's default.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trt_eagle3.bench.peers.driver import check_version
from trt_eagle3.bench.peers.protocol import PeerJob, PeerPrompt, PeerReply, PeerRound

__all__ = ["start"]

_LEAST = (0, 25)  # the version whose interfaces this code uses
_NO_CHECK = 0.05  # memory share: the KV cache is given in bytes, and others use this GPU too
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # this process steps the engine
    "VLLM_NO_USAGE_STATS": "1",
}
# Rows of captured graphs, in place of vLLM's own list of 51: a step is padded to the next size.
_CAPTURED = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def start(job: PeerJob) -> VllmPeer:
    """Load the checkpoints.

    Raises:
        PeerError: vLLM is missing or too old.
    """
    found = check_version("vllm", _LEAST, "vllm==0.25.1")
    _set_environment()
    return VllmPeer(job, found)


def _set_environment() -> None:
    """Set the variables that vLLM reads on import, unless the user has set them."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if find_spec("flashinfer_cubin") is None:  # avoid its download or build; greedy needs none
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


class VllmPeer:
    """A pair of checkpoints in vLLM."""

    def __init__(self, job: PeerJob, found: str) -> None:
        from vllm import LLM

        self.version = found
        self._llm = LLM(**_arguments(job))
        self._engine = self._llm.llm_engine
        self._count = 0

    def run(self, asked: PeerRound) -> Sequence[PeerReply]:
        """Step the engine; submit the next prompt when an answer is finished."""
        queue = list(enumerate(asked.prompts))[::-1]
        answers: dict[str, _Answer] = {}
        found: dict[int, PeerReply] = {}
        while queue or answers:
            while queue and len(answers) < asked.concurrency:
                index, prompt = queue.pop()
                answer = _Answer(index, time.perf_counter())
                answers[self._add(prompt, asked)] = answer
            for output in self._engine.step():
                answer = answers[output.request_id]
                answer.take(output.outputs[0].token_ids)
                if output.finished:
                    del answers[output.request_id]
                    found[answer.index] = answer.reply()
        return [found[index] for index in range(len(asked.prompts))]

    def _add(self, prompt: PeerPrompt, asked: PeerRound) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=asked.max_tokens,
            ignore_eos=asked.ignore_eos,
            output_kind=RequestOutputKind.DELTA,
        )
        self._count += 1
        name = str(self._count)
        self._engine.add_request(name, self._input(prompt), sampling)
        return name

    def _input(self, prompt: PeerPrompt) -> Any:
        if prompt.token_ids:
            return {"prompt_token_ids": list(prompt.token_ids)}
        return self._llm._preprocess_chat_one([{"role": "user", "content": _content(prompt)}])


def _arguments(job: PeerJob) -> dict[str, Any]:
    """Return the arguments of ``LLM``."""
    arguments: dict[str, Any] = {
        "model": job.target,
        "dtype": job.dtype,
        "max_model_len": job.max_seq_len,
        "max_num_seqs": job.max_batch_size,
        "kv_cache_memory_bytes": job.kv_bytes,
        "gpu_memory_utilization": _NO_CHECK,
        "enable_prefix_caching": False,
        "mm_processor_cache_gb": 0,
        "allowed_local_media_path": "/",
        "skip_mm_profiling": True,
        "compilation_config": {"cudagraph_capture_sizes": _captured(job)},
    }
    if job.draft is not None:
        arguments["speculative_config"] = {
            **job.draft_options,
            **({} if job.draft == job.target else {"model": job.draft}),
            "num_speculative_tokens": job.num_steps,
        }
    return arguments


def _captured(job: PeerJob) -> list[int]:
    """Return the rows of steps to capture, up to those of the largest batch, inclusive."""
    most = job.max_batch_size * (1 if job.draft is None else 1 + job.num_steps)
    return [*(size for size in _CAPTURED if size < most), min(most, _CAPTURED[-1])]


def _content(prompt: PeerPrompt) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for kind, files in (("image_url", prompt.images), ("video_url", prompt.videos)):
        parts += [{"type": kind, kind: {"url": Path(file).as_uri()}} for file in files]
    return [*parts, {"type": "text", "text": prompt.prompt}]


class _Answer:
    """The answer to one prompt, filled step by step."""

    def __init__(self, index: int, start: float) -> None:
        self.index = index
        self._tokens: list[int] = []
        self._gaps: list[tuple[float, int]] = []
        self._last = start

    def take(self, tokens: Sequence[int]) -> None:
        """Add the tokens of a step."""
        if tokens:
            now = time.perf_counter()
            self._gaps.append((now - self._last, len(tokens)))
            self._tokens += tokens
            self._last = now

    def reply(self) -> PeerReply:
        """Return the whole answer."""
        return PeerReply(tuple(self._tokens), self._gaps[0][0], tuple(self._gaps[1:]))
