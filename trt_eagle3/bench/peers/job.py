"""The job of a peer: a bundle's checkpoints and limits, and an equal size of KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trt_eagle3.bench.peers import PEER_NAMES, START_S
from trt_eagle3.bench.peers.process import PeerProcess
from trt_eagle3.bench.peers.protocol import PeerJob, PeerPrompt
from trt_eagle3.config import LimitsConfig
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.drafts.registry import kind_of
from trt_eagle3.engine.runtime.memory import free_bytes, memory_need, num_pages
from trt_eagle3.errors import UserError
from trt_eagle3.prompts.prompt_file import Question

__all__ = ["PeerOptions", "can_draft", "check_peer", "open_peer", "peer_prompts", "shared_limits"]

_KV_SHARE = 0.17  # of the free memory, because three programs share the GPU, including weights
_SLACK = 1.1  # a peer's pages are larger and partly unused
_FEWEST_ROWS = 4096


@dataclass(frozen=True)
class PeerOptions:
    """Choice of the peer, and differences from the bundle's record.

    Attributes:
        name: one of ``PEERS``.
        checkpoint, draft: folders in place of those that the bundle was built from.
        python: of the environment that has the peer; None: this one.
        log: folder for the stderr of its processes; None: only the last line of a failed one is
            shown.
        start_seconds: time within which it must be ready.
    """

    name: str
    checkpoint: Path | None = None
    draft: Path | None = None
    python: Path | None = None
    log: Path | None = None
    start_seconds: float = START_S

    def log_file(self, *, speculation: bool) -> Path | None:
        """Return the log file of the process with or without speculation."""
        if self.log is None:
            return None
        return self.log / f"{self.name}-{'speculative' if speculation else 'plain'}.log"


def check_peer(name: str) -> None:
    """Reject an unknown peer."""
    if name not in PEER_NAMES:
        raise UserError(f"--against {name}: expected {' or '.join(PEER_NAMES)}")


def can_draft(name: str) -> bool:
    """Return whether the peer supports drafts."""
    return name == "vllm"


@contextmanager
def open_peer(
    options: PeerOptions,
    bundle: LoadedBundle,
    *,
    has_media: bool,
    speculation: bool = False,
    batch_size: int = 1,
) -> Iterator[PeerProcess]:
    """Start a peer on the checkpoints of ``bundle``; call ``wait`` before the first round.

    Args:
        has_media: prompts will have images or videos.
        speculation: run with the draft.
    Raises:
        UserError: a checkpoint is missing from the folder that the bundle was built from.
    """
    target = _folder(bundle, "target", options.checkpoint, "--checkpoint")
    manifest, draft = bundle.manifest, None
    kind = None if manifest is None or not speculation else kind_of(manifest)
    if kind is not None:
        draft = target
    if kind is not None and not kind.in_target:
        draft = _folder(bundle, "draft", options.draft, "--draft-checkpoint")
    rows = shared_limits(bundle, batch_size).max_kv_tokens or 0
    job = PeerJob(
        target=str(target),
        processor=str(bundle.path.absolute() / "processor"),
        draft=None if draft is None else str(draft),
        num_steps=bundle.record.config.speculation.steps,
        dtype=bundle.record.config.engine.dtype,
        device=bundle.device,
        max_seq_len=bundle.limits.max_seq_len,
        max_batch_size=batch_size,
        kv_bytes=int(_SLACK * rows * _row_bytes(bundle)),
        has_media=has_media,
        draft_options={} if kind is None or manifest is None else kind.vllm_options(manifest),
    )
    log = options.log_file(speculation=speculation)
    with PeerProcess(options.name, job, options.python, log) as peer:
        yield peer


def peer_prompts(questions: Sequence[Question], count: int) -> list[PeerPrompt]:
    """Return ``count`` prompts that cycle through the questions, whose images are files."""
    turns = (questions[index % len(questions)] for index in range(count))
    return [PeerPrompt(q.prompt, tuple(str(image) for image in q.images)) for q in turns]


def _folder(bundle: LoadedBundle, role: str, given: Path | None, option: str) -> Path:
    folder = Path(bundle.record.sources[role].path) if given is None else given
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no {role} checkpoint there. Give its folder: {option} DIR")
    return folder.absolute()


def shared_limits(bundle: LoadedBundle, batch_size: int) -> LimitsConfig:
    """Return the bundle's limits with a KV cache that leaves room for its peers.

    It has at most the rows of ``batch_size`` whole sequences.
    """
    size = bundle.page_size
    rows = min((num_pages(bundle.limits, size) - 1) * size, batch_size * bundle.limits.max_seq_len)
    free = free_bytes() if bundle.device == "cuda" else None
    if free is not None:
        rows = min(rows, int(_KV_SHARE * free) // _row_bytes(bundle))
    return bundle.limits.model_copy(
        update={"max_kv_tokens": max(rows, bundle.limits.max_seq_len, _FEWEST_ROWS)}
    )


def _row_bytes(bundle: LoadedBundle) -> int:
    """Return the bytes of one token in the KV caches of target and draft."""
    engine = bundle.record.config.engine
    return memory_need(bundle.spec, bundle.manifest, bundle.limits, engine).kv_token
