"""The protocol between a benchmark and a peer's process: one JSON object per line.

The process reads a job, and writes a line when it is ready. Then it reads rounds and writes
replies, until the input ends. On failure it writes an object with ``error`` in place of an answer.
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
    """What a peer opens.

    Attributes:
        target: folder of the target's checkpoint.
        processor: folder of its tokenizer, chat template and image processor.
        draft: folder of the draft; the target's folder if the draft is part of it; None: no
            speculation.
        num_steps: draft tokens per cycle.
        draft_options: vLLM's options for the draft's kind.
        dtype: ``float32``, ``float16`` or ``bfloat16``.
        device: ``cpu`` or ``cuda``.
        max_seq_len: tokens of a sequence.
        max_batch_size: sequences at once.
        kv_bytes: of the KV cache, if the peer allocates it at start.
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
    draft_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PeerPrompt:
    """A user's turn: files of images and videos, then a text; or only ``token_ids``."""

    prompt: str = ""
    images: tuple[str, ...] = ()
    videos: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class PeerRound:
    """Prompts to answer greedily, with ``concurrency`` of them in flight."""

    prompts: tuple[PeerPrompt, ...]
    max_tokens: int
    ignore_eos: bool
    concurrency: int


@dataclass(frozen=True)
class PeerReply:
    """One answer.

    Attributes:
        first_token_seconds: from the request to its first token.
        passes: of every later step, seconds since the previous step, and tokens.
    """

    token_ids: tuple[int, ...]
    first_token_seconds: float
    passes: tuple[tuple[float, int], ...] = field(default=())


class PeerError(Exception):
    """An error of a peer, in one line.

    ``missing``: a package is missing on this machine; else the job is invalid.
    """

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


class Peer(Protocol):
    """An open peer, inside its process."""

    version: str

    def run(self, asked: PeerRound) -> Sequence[PeerReply]:
        """Answer all prompts; return replies in their order.

        Raises:
            PeerError: the peer cannot process a prompt.
        """
        ...


def from_line(line: str) -> Mapping[str, Any]:
    """Parse the JSON object of a line."""
    found: dict[str, Any] = json.loads(line)
    return found


def round_of(found: Mapping[str, Any]) -> PeerRound:
    """Build a round from its JSON values."""
    prompts = tuple(
        PeerPrompt(p["prompt"], *(tuple(p[n]) for n in ("images", "videos", "token_ids")))
        for p in found["prompts"]
    )
    return PeerRound(prompts, found["max_tokens"], found["ignore_eos"], found["concurrency"])


def reply_of(found: Mapping[str, Any]) -> PeerReply:
    """Build a reply from its JSON values."""
    passes = tuple((float(seconds), int(count)) for seconds, count in found["passes"])
    return PeerReply(tuple(found["token_ids"]), found["first_token_seconds"], passes)


def to_line(value: Any) -> str:
    """Format a data class or a mapping as a line."""
    return json.dumps(value if isinstance(value, Mapping) else asdict(value)) + "\n"
