"""bench --against: compare a bundle with another engine on the same checkpoints and prompts.

Both run on the same machine; the other engine runs in its own process. Rounds alternate, and the
first round of each load is not counted. Answers are compared too: if they differ, a ratio compares
different work.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from PIL import Image

from trt_eagle3.bench import MAX_TOKENS, ROUNDS
from trt_eagle3.bench.peers.job import (
    PeerOptions,
    can_draft,
    check_peer,
    open_peer,
    peer_prompts,
    shared_limits,
)
from trt_eagle3.bench.peers.process import PeerProcess
from trt_eagle3.bench.peers.report import AgainstReport, AgainstRow, FirstTokenComparison
from trt_eagle3.bench.result import Side
from trt_eagle3.bench.run import request_counts
from trt_eagle3.bench.workload import (
    Load,
    Progress,
    Run,
    batch_sizes,
    drive,
    make_requests,
    open_engine,
)
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.engine.runtime.machine import machine_name
from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.image import load_image
from trt_eagle3.prompts.kept import origin_of, questions_for
from trt_eagle3.prompts.prompt_file import Question

__all__ = ["Contest", "against", "open_contest"]

Ask = Callable[[int, int], Run]
"""Answers ``count`` requests, with so many in flight."""
Heard = Callable[[AgainstRow], object]


class Contest:
    """A bundle's engine and a peer, both open, on the same checkpoints."""

    def __init__(self, engine: LLM, peers: Mapping[bool, PeerProcess], version: str) -> None:
        """``peers``: one without speculation, and one with it if the peer supports drafts."""
        self.engine = engine
        self.peers = peers
        self.peer_version = version

    def measure(
        self,
        questions: Sequence[Question],
        counts: Mapping[Load, int],
        *,
        rounds: int = ROUNDS,
        max_tokens: int = MAX_TOKENS,
        ignore_eos: bool = False,
        progress: Progress = lambda *_: None,
        heard: Heard = lambda _: None,
    ) -> AgainstReport:
        """Answer requests made from ``questions``, whose images are files.

        Args:
            counts: requests by load.
            heard: called with each row as soon as it is measured.
        """
        options = {"max_tokens": max_tokens, "ignore_eos": ignore_eos}
        facts = {**self._facts(), **options, "rounds": rounds, "num_prompts": len(questions)}
        asks, rows = self._asks(questions, options), list[AgainstRow]()
        for number, (load, count) in enumerate(counts.items()):
            progress("loads", number, len(counts))
            for row in _rows(load, _rounds(asks, load, count, rounds), len(questions)):
                heard(row)
                rows.append(row)
        progress("loads", 1, 1)
        return AgainstReport(facts, tuple(rows))

    def _asks(
        self, questions: Sequence[Question], options: Mapping[str, Any]
    ) -> dict[tuple[str, bool], Ask]:
        """Return functions that run requests, by side and by whether it speculates."""

        def ours(speculation: bool) -> Ask:
            return lambda count, size: drive(
                self.engine,
                make_requests(questions, count, speculation=speculation, **options),
                Load(size),
            )

        def theirs(peer: PeerProcess) -> Ask:
            return lambda count, size: peer.run(
                peer_prompts(questions, count), concurrency=size, **options
            )

        found: dict[tuple[str, bool], Ask] = {}
        for speculation in (False, True) if self.engine.bundle.manifest is not None else (False,):
            found["ours", speculation] = ours(speculation)
            if speculation in self.peers:
                found["peer", speculation] = theirs(self.peers[speculation])
        return found

    def _facts(self) -> dict[str, Any]:
        bundle = self.engine.bundle
        return {
            "bundle": str(bundle.path),
            "version": version("trt-eagle3"),
            "peer": self.peers[False].name,
            "peer_version": self.peer_version,
            "machine": machine_name(bundle.device),
            "backend": bundle.record.engine.backend,
            "dtype": bundle.record.config.engine.dtype,
            "speculation": bundle.record.config.speculation.model_dump(mode="json"),
        }


@contextmanager
def open_contest(
    bundle: LoadedBundle,
    options: PeerOptions,
    *,
    batch_size: int,
    has_media: bool,
    speculation: bool = True,
    progress: Progress = lambda *_: None,
) -> Iterator[Contest]:
    """Open the peer on the checkpoints of ``bundle``, then the bundle.

    The bundle's KV cache is no larger than the peer's.

    Args:
        batch_size: most requests in flight.
        has_media: prompts will have images.
        speculation: of the peer, if both sides support it.
    Raises:
        UserError: the peer's checkpoints are invalid.
        EnvironmentMissingError: the peer is not installed.
    """
    check_peer(options.name)
    both = speculation and bundle.manifest is not None and can_draft(options.name)
    with ExitStack() as stack:
        engine = LLM(replace(bundle, limits=shared_limits(bundle, batch_size)), prefix_cache=False)
        stack.callback(engine.close)
        peers = {
            drafting: stack.enter_context(
                open_peer(
                    options,
                    bundle,
                    has_media=has_media,
                    speculation=drafting,
                    batch_size=batch_size,
                )
            )
            for drafting in ((False, True) if both else (False,))
        }
        versions = []
        for number, peer in enumerate(peers.values()):
            progress("engines", number, len(peers))
            versions.append(peer.wait(options.start_seconds))
        progress("engines", 1, 1)
        engine.start()  # after the peers, whose memory is reserved first
        yield Contest(engine, peers, versions[0])


def against(
    bundle: Path,
    peer: PeerOptions,
    *,
    prompts: Path | None = None,
    first_token: Sequence[Path] = (),
    batches: Sequence[int] = (),
    requests: Sequence[int] = (),
    rounds: int = ROUNDS,
    progress: Progress = lambda *_: None,
    heard: Heard = lambda _: None,
    **options: Any,
) -> AgainstReport:
    """Measure a bundle and ``peer``, without speculation, and with it if both support drafts.

    Args:
        prompts, batches, requests, rounds, options: as in ``bench``. Prompts with videos are
            skipped.
        first_token: prompt files; the time to the first token of their prompts, one at a time, is
            measured too.
        heard: called with each row of a load as soon as it is measured.
    Raises:
        UserError: the bundle, the prompts or the peer's checkpoints are invalid.
        EnvironmentMissingError: the peer is not installed.
    """
    check_peer(peer.name)
    engine = open_engine(bundle)
    vision = engine.bundle.spec.vision is not None
    asked = questions_for(bundle, prompts, vision=vision)
    with tempfile.TemporaryDirectory() as folder:
        questions, num_left_out = _as_files(asked, Path(folder))
        alone = {
            file: _as_files(questions_for(bundle, file, vision=vision), Path(folder, str(index)))[0]
            for index, file in enumerate(first_token)
        }
        loads = [Load(size) for size in batch_sizes(engine, batches)]
        counts = request_counts(loads, requests, len(questions))
        has_media = any(q.images for some in (questions, *alone.values()) for q in some)
        with open_contest(
            engine.bundle,
            peer,
            batch_size=loads[-1].concurrency,
            has_media=has_media,
            progress=progress,
        ) as contest:
            report = contest.measure(
                questions, counts, rounds=rounds, progress=progress, heard=heard, **options
            )
            found = tuple(
                FirstTokenComparison(str(file), row)
                for file, some in alone.items()
                for row in contest.measure(
                    some, {Load(1): len(some)}, rounds=rounds, max_tokens=1
                ).rows
            )
    facts = {**report.facts, "prompts": origin_of(bundle, prompts)}
    return replace(report, facts=facts, num_left_out=num_left_out, first_tokens=found)


def _as_files(asked: Sequence[Question], folder: Path) -> tuple[list[Question], int]:
    """Return prompts with images as files in ``folder``, and the number of skipped prompts."""
    folder.mkdir(exist_ok=True)
    kept = [question for question in asked if not question.videos]
    if not kept:
        raise UserError("--against: all prompts have videos, which it skips. Give other prompts.")
    found = []
    for number, question in enumerate(kept):
        images = [
            _as_file(image, folder / f"{number}-{index}.png")
            for index, image in enumerate(question.images)
        ]
        found.append(Question(question.prompt, images))
    return found, len(asked) - len(kept)


def _as_file(image: Any, file: Path) -> Path:
    if isinstance(image, str | Path):
        return Path(image).absolute()
    (image if isinstance(image, Image.Image) else load_image(image)).save(file)
    return file


_Found = Mapping[tuple[str, bool], list[Run]]


def _rounds(asks: Mapping[tuple[str, bool], Ask], load: Load, count: int, rounds: int) -> _Found:
    """Run a load on every side; the order of the sides alternates between rounds."""
    found: dict[tuple[str, bool], list[Run]] = {}
    order = list(asks)
    for number in range(rounds + 1):
        for side in order if number % 2 else order[::-1]:
            run = asks[side](count, load.concurrency)
            if number:
                found.setdefault(side, []).append(run)
    return found


def _rows(load: Load, found: _Found, num_prompts: int) -> list[AgainstRow]:
    """Pair sides without speculation, and with it; a peer without drafts stays without it."""
    rows = []
    for speculation in (False, True):
        if ("ours", speculation) not in found:
            continue
        same = ("peer", speculation) in found
        ours = Side(tuple(found["ours", speculation]))
        theirs = Side(tuple(found["peer", speculation and same]))
        rows.append(AgainstRow(load, speculation, speculation and same, ours, theirs, num_prompts))
    return rows
