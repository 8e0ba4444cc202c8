"""transformers' ``generate``, with ``concurrency`` prompts at a time in one padded batch.

It uses the static cache, with which transformers compiles and captures decoding steps on a GPU.
There is one cache per batch size; otherwise every length would be recompiled. transformers has no
EAGLE-3 and no continuous batching: a batch ends with its longest answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from trt_eagle3.bench.peers.driver import check_version
from trt_eagle3.bench.peers.protocol import PeerError, PeerJob, PeerPrompt, PeerReply, PeerRound

__all__ = ["start"]

_LEAST = (4, 57)  # the first version with Qwen3-VL


def start(job: PeerJob) -> TransformersPeer:
    """Load the checkpoint.

    Raises:
        PeerError: transformers or a dependency of its processors is missing or too old, or a draft
            is given.
    """
    found = check_version("transformers", _LEAST, "transformers>=4.57")
    if job.draft is not None:
        raise PeerError("transformers: has no EAGLE-3. Compare it without a draft.")
    if job.has_media and find_spec("torchvision") is None:
        raise PeerError(
            "transformers: its image processors need torchvision. Run: pip install torchvision",
            missing=True,
        )
    return TransformersPeer(job, found)


class TransformersPeer:
    """A checkpoint in transformers."""

    def __init__(self, job: PeerJob, found: str) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        self.version = found
        self._job = job
        config = AutoConfig.from_pretrained(job.target)
        self._vision = hasattr(config, "vision_config")
        kind: Any = AutoModelForImageTextToText if self._vision else AutoModelForCausalLM
        model = kind.from_pretrained(job.target, dtype=getattr(torch, job.dtype))
        self._model = model.to(job.device).eval()
        self._eos = self._model.generation_config.eos_token_id
        self._tokenizer, self._processor = self._readers()
        self._caches: dict[int, Any] = {}
        self._rooms: dict[int, int] = {}  # batch size -> tokens that its cache holds
        self._lengths: dict[PeerPrompt, int] = {}

    def run(self, asked: PeerRound) -> Sequence[PeerReply]:
        """Answer ``concurrency`` prompts at a time."""
        self._make_room(asked)
        replies: list[PeerReply] = []
        for begin in range(0, len(asked.prompts), asked.concurrency):
            replies += self._batch(asked.prompts[begin : begin + asked.concurrency], asked)
        return replies

    def _readers(self) -> tuple[Any, Any]:
        """Load the tokenizer, and the processor if prompts have images."""
        from transformers import AutoProcessor, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self._job.processor, padding_side="left")
        if not self._job.has_media:
            return tokenizer, None
        processor = AutoProcessor.from_pretrained(self._job.processor)
        processor.tokenizer.padding_side = "left"
        return tokenizer, processor

    def _batch(self, prompts: Sequence[PeerPrompt], asked: PeerRound) -> list[PeerReply]:
        import torch
        from transformers import GenerationConfig

        streamer = _StepTimes(time.perf_counter())
        inputs = self._inputs(prompts).to(self._job.device)
        pad, cache = self._tokenizer.pad_token_id, self._caches[len(prompts)]
        # replaces the model's own config, which would fill in the fields that are None here
        self._model.generation_config = GenerationConfig(
            do_sample=False,
            max_new_tokens=asked.max_tokens,
            eos_token_id=None if asked.ignore_eos else self._eos,
            pad_token_id=self._eos_ids[0] if pad is None else pad,
        )
        with torch.inference_mode():
            cache.reset()
            tokens = self._model.generate(**inputs, past_key_values=cache, streamer=streamer)
        rows = tokens[:, inputs["input_ids"].shape[1] :].tolist()
        ends = () if asked.ignore_eos else self._eos_ids
        return [streamer.reply(_until(row, ends)) for row in rows]

    def _make_room(self, asked: PeerRound) -> None:
        """Create caches for the batches of a round, sized for its longest possible answer."""
        from transformers import StaticCache

        count, size = len(asked.prompts), asked.concurrency
        batches = {min(size, count), count % size or size}
        need = max(map(self._length, asked.prompts)) + asked.max_tokens
        for batch in batches:
            if self._rooms.get(batch, 0) < need:
                self._rooms[batch] = need
                self._caches[batch] = StaticCache(config=self._model.config, max_cache_len=need)

    def _length(self, prompt: PeerPrompt) -> int:
        """Return the prompt's tokens; cached in a round that is not counted."""
        if prompt not in self._lengths:
            self._lengths[prompt] = self._inputs([prompt])["input_ids"].shape[1]
        return self._lengths[prompt]

    @property
    def _eos_ids(self) -> tuple[int, ...]:
        return (self._eos,) if isinstance(self._eos, int) else tuple(self._eos or (0,))

    def _inputs(self, prompts: Sequence[PeerPrompt]) -> Any:
        if all(prompt.token_ids for prompt in prompts):
            return self._tokenizer.pad(
                {"input_ids": [list(p.token_ids) for p in prompts]}, return_tensors="pt"
            )
        return (self._processor or self._tokenizer).apply_chat_template(
            [[{"role": "user", "content": self._content(prompt)}] for prompt in prompts],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            **({"padding": True} if self._processor is None else _PADDED),
        )

    def _content(self, prompt: PeerPrompt) -> str | list[dict[str, str]]:
        if self._processor is None:
            return prompt.prompt
        images = [{"type": "image", "image": file} for file in prompt.images]
        videos = [{"type": "video", "video": file} for file in prompt.videos]
        return [*images, *videos, {"type": "text", "text": prompt.prompt}]


_PADDED = {"processor_kwargs": {"padding": True}}


def _until(row: list[int], ends: Sequence[int]) -> tuple[int, ...]:
    """Cut an answer after its end token; padding follows it."""
    last = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
    return tuple(row[: last + 1])


class _StepTimes:
    """A streamer of ``generate`` that records when each step's tokens reach the host."""

    def __init__(self, start: float) -> None:
        self._times = [start]
        self._prompt_seen = False

    def put(self, value: object) -> None:
        """Record the time of a step; the first call has the prompts."""
        del value
        if self._prompt_seen:
            self._times.append(time.perf_counter())
        self._prompt_seen = True

    def end(self) -> None:
        """Do nothing: there is nothing to flush."""

    def reply(self, tokens: tuple[int, ...]) -> PeerReply:
        """Return the answer of one row; every token took one step."""
        gaps = [after - before for before, after in zip(self._times, self._times[1:], strict=False)]
        passes = tuple((gap, 1) for gap in gaps[1 : len(tokens)])
        return PeerReply(tokens, gaps[0], passes)
