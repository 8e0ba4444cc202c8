"""What passes between a benchmark and a peer's process: one JSON object a line.

First the job goes in, and what is ready comes out; then rounds go in and replies come out, until
the input ends. An object with ``error`` takes the place of any answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

__all__ = [
    "Peer",
    "PeerError",
    "PeerJob",
    "PeerPrompt",
    "PeerReply",
    "PeerRound",
    "from_line",
    "reply_of",
    "round_of",
    "to_line",
]


@dataclass(frozen=True)
class PeerJob:
    """What to open.

    Attributes:
        target: folder of the target's checkpoint. processor: folder of its tokenizer, chat template
            and image processor.
        draft: folder of the draft, the target's own of a head that is part of it; None: no
            speculation. num_steps: its tokens per cycle. draft_method: what vLLM calls its kind.
        dtype: ``float32``, ``float16`` or ``bfloat16``. device: ``cpu`` or ``cuda``.
        max_seq_len: tokens of a sequence. max_batch_size: sequences at once.
        kv_bytes: of the KV cache, where the peer allocates it beforehand.
        has_media: whether prompts will have images or videos.
    """

    target: str
    processor: str
    draft: str | None
    num_steps: int
    dtype: str
    device: str
    max_seq_len: int
    max_batch_size: int
    kv_bytes: int
    has_media: bool
    draft_method: str = "eagle3"


@dataclass(frozen=True)
class PeerPrompt:
    """A user's turn: files of images and videos, then a text; or ``token_ids`` as they are."""

    prompt: str = ""
    images: tuple[str, ...] = ()
    videos: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class PeerRound:
    """Prompts to answer greedily, ``concurrency`` of them in flight."""

    prompts: tuple[PeerPrompt, ...]
    max_tokens: int
    ignore_eos: bool
    concurrency: int


@dataclass(frozen=True)
class PeerReply:
    """One answer.

    Attributes:
        first_token_seconds: from the request to its first token.
        passes: seconds since the last one, and tokens, of every later step.
    """

    token_ids: tuple[int, ...]
    first_token_seconds: float
    passes: tuple[tuple[float, int], ...] = field(default=())


class PeerError(Exception):
    """What a peer cannot do, in one line.

    ``missing``: this machine lacks something; else the job is wrong.
    """

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


class Peer(Protocol):
    """A peer that is open, as its process holds it."""

    version: str

    def run(self, asked: PeerRound) -> Sequence[PeerReply]:
        """Answer all prompts; replies in their order.

        Raises:
            PeerError: a prompt that the peer cannot take.
        """
        ...


def from_line(line: str) -> Mapping[str, Any]:
    """The object of a line."""
    found: dict[str, Any] = json.loads(line)
    return found


def round_of(found: Mapping[str, Any]) -> PeerRound:
    """A round of its JSON values."""
    prompts = tuple(
        PeerPrompt(p["prompt"], *(tuple(p[n]) for n in ("images", "videos", "token_ids")))
        for p in found["prompts"]
    )
    return PeerRound(prompts, found["max_tokens"], found["ignore_eos"], found["concurrency"])


def reply_of(found: Mapping[str, Any]) -> PeerReply:
    """A reply of its JSON values."""
    passes = tuple((float(seconds), int(count)) for seconds, count in found["passes"])
    return PeerReply(tuple(found["token_ids"]), found["first_token_seconds"], passes)


def to_line(value: Any) -> str:
    """A data class or a mapping as a line."""
    return json.dumps(value if isinstance(value, Mapping) else asdict(value)) + "\n"
