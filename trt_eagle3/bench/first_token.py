"""Time to the first token of prompts with images and videos: ``trt-eagle3 bench BUNDLE --images``.

Each request has new JPEG or MPEG-4 files, runs on an idle engine, and asks for one token.
Preparation and the vision tower are also measured alone, on files of the same kind. Another engine
may answer the same files in the same run.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image

from trt_eagle3.bench.peers.job import PeerOptions, check_peer, open_peer, shared_limits
from trt_eagle3.bench.peers.process import PeerProcess
from trt_eagle3.bench.peers.protocol import PeerPrompt
from trt_eagle3.bench.workload import Progress, open_engine
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.engine.runtime.machine import machine_name
from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.io.terminal_text import TextTable

__all__ = ["FirstTokenReport", "first_token"]

_ONE_TOKEN = SamplingParams(max_tokens=1)
_PROMPT = "What is in this picture?"
_WARM_ROUNDS = 2
_ROUNDS = 4
_QUALITY = 90  # of the JPEGs, about the quality of phone cameras
_FRAMES_PER_SECOND = 2  # the sampling rate of Qwen3-VL, so that every frame is kept


@dataclass(frozen=True)
class _Case:
    """One kind of prompt: ``count`` images of one size, or with ``frames`` one video."""

    width: int
    height: int
    count: int = 1
    frames: int = 0

    def __str__(self) -> str:
        if self.frames:
            return f"video, {self.frames} frames of {self.width} x {self.height}"
        return f"{f'{self.count} of ' if self.count > 1 else ''}{self.width} x {self.height}"


_CASES = (
    _Case(512, 512),
    _Case(1024, 1024),
    _Case(1024, 1024, count=4),
    _Case(2048, 2048),
    _Case(4032, 3024),
    _Case(448, 448, frames=16),
    _Case(448, 448, frames=64),
    _Case(448, 448, frames=256),
)


@dataclass(frozen=True)
class FirstTokenRow:
    """Medians in milliseconds of one kind of prompt.

    Attributes:
        prompt_tokens: tokens of the prompt.
        prepare: decoding, resizing, cutting and tokenising, alone.
        vision: the vision tower alone.
        total: from the request to its token.
        peer: the total of the other engine; None without one.
    """

    case: str
    prompt_tokens: int
    prepare: float
    vision: float
    total: float
    peer: float | None = None


@dataclass(frozen=True)
class FirstTokenReport:
    """The measurements.

    ``left_out``: kinds of prompts that were skipped (beyond the bundle's limits), and why.
    """

    machine: str
    peer: str | None
    rows: tuple[FirstTokenRow, ...]
    left_out: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)

    def table(self) -> TextTable:
        """Return a table for the terminal."""
        peers = [self.peer, "ratio"] if self.peer else []
        table = TextTable(
            f"first token, {self.machine}", "tokens", "prepare", "vision", "total ms", *peers
        )
        for row in self.rows:
            parts = [f"{value:.1f}" for value in (row.prepare, row.vision, row.total)]
            if row.peer is not None:
                parts += [f"{row.peer:.1f}", f"{row.peer / row.total:.2f}"]
            table.add_row(row.case, str(row.prompt_tokens), *parts)
        return table


def first_token(
    bundle: Path, *, peer: PeerOptions | None = None, progress: Progress = lambda *_: None
) -> FirstTokenReport:
    """Measure a bundle.

    Args:
        peer: also measured on the same files, in its own process.
    Raises:
        UserError: the bundle is invalid, its target reads text only, or the peer is unknown.
        EnvironmentMissingError: the peer is not installed, or cannot prepare images here.
    """
    if peer is not None:
        check_peer(peer.name)
    rows, left_out = [], {}
    with ExitStack() as stack:
        engine = open_engine(bundle)
        stack.callback(engine.close)
        if engine.bundle.spec.vision is None:
            raise UserError(f"{bundle}: its target reads text only. Leave --images out.")
        other = None
        if peer is not None:
            other = stack.enter_context(open_peer(peer, engine.bundle, has_media=True))
            other.wait(peer.start_seconds)
            limits = shared_limits(engine.bundle, 1)
            engine = LLM(replace(engine.bundle, limits=limits), prefix_cache=False)
            stack.callback(engine.close)
        engine.start()
        for number, case in enumerate(_CASES):
            progress("cases", number, len(_CASES))
            try:
                rows.append(_measure(engine, case, other))
            except (UserError, EnvironmentMissingError) as error:
                left_out[str(case)] = str(error)
        progress("cases", 1, 1)
        name = peer.name if peer else None
        return FirstTokenReport(machine_name(engine.bundle.device), name, tuple(rows), left_out)


def _measure(engine: LLM, case: _Case, peer: PeerProcess | None) -> FirstTokenRow:
    with tempfile.TemporaryDirectory() as folder:
        files = _files(case, Path(folder))
        tokens = len(engine.prepare(_PROMPT, **_media(case, next(files))).token_ids)
        if tokens >= engine.bundle.limits.max_seq_len:
            raise UserError(
                f"{tokens} prompt tokens, limits.max_seq_len is {engine.bundle.limits.max_seq_len}"
            )
        return FirstTokenRow(
            str(case),
            tokens,
            _median_ms(partial(_prepare, engine, case), files),
            _vision_ms(engine, case, files),
            _median_ms(partial(_generate, engine, case), files),
            None if peer is None else _median_ms(partial(_ask_peer, peer, case), files),
        )


def _median_ms(run: Callable[[list[Path]], object], files: Iterator[list[Path]]) -> float:
    times = []
    for _ in range(_WARM_ROUNDS + _ROUNDS):
        given = next(files)
        start = time.perf_counter()
        run(given)
        times.append(time.perf_counter() - start)
    return 1e3 * median(times[_WARM_ROUNDS:])


def _prepare(engine: LLM, case: _Case, files: list[Path]) -> None:
    engine.prepare(_PROMPT, **_media(case, files))


def _generate(engine: LLM, case: _Case, files: list[Path]) -> None:
    engine.generate(_PROMPT, sampling=_ONE_TOKEN, **_media(case, files))


def _ask_peer(peer: PeerProcess, case: _Case, files: list[Path]) -> None:
    paths = tuple(map(str, files))
    prompt = PeerPrompt(_PROMPT, videos=paths) if case.frames else PeerPrompt(_PROMPT, paths)
    peer.run([prompt], max_tokens=1)


@torch.inference_mode()
def _vision_ms(engine: LLM, case: _Case, files: Iterator[list[Path]]) -> float:
    """Measure the time from prepared bytes to embeddings on the device."""
    prepared = (
        engine.prepare(_PROMPT, **_media(case, next(files))) for _ in range(_WARM_ROUNDS + _ROUNDS)
    )
    preprocessor, encoder = engine.bundle.preprocessor(), engine.bundle.vision_encoder()
    times = []
    for inputs in prepared:
        prompt = preprocessor.prompt(inputs)
        start = time.perf_counter()
        encoder.encode(prompt)
        if engine.bundle.device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * median(times[_WARM_ROUNDS:])


def _media(case: _Case, files: list[Path]) -> dict[str, Any]:
    return {"videos" if case.frames else "images": files}


def _files(case: _Case, folder: Path) -> Iterator[list[Path]]:
    """Yield new files of a case each time; they are written outside the timed region."""
    random = np.random.default_rng(0)
    number = 0
    while True:
        given = []
        for _ in range(case.count):
            number += 1
            file = folder / f"{number}.{'mp4' if case.frames else 'jpg'}"
            if case.frames:
                _write_video(file, case, random)
            else:
                Image.fromarray(_draw_image(case, random)).save(file, quality=_QUALITY)
            given.append(file)
        yield given


def _draw_image(case: _Case, random: np.random.Generator) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Draw smooth shapes with some noise, similar to photos."""
    small = random.integers(0, 256, (9, 12, 3), dtype=np.uint8)
    smooth = np.asarray(
        Image.fromarray(small).resize((case.width, case.height), Image.Resampling.BICUBIC)
    )
    noise = random.integers(0, 12, smooth.shape, dtype=np.uint8)
    return (smooth // 2 + noise + 50).astype(np.uint8)


def _write_video(file: Path, case: _Case, random: np.random.Generator) -> None:
    if find_spec("av") is None:
        raise EnvironmentMissingError(
            "videos need PyAV. Install it: pip install 'trt-eagle3[video]'"
        )
    import av

    with av.open(str(file), "w") as container:
        stream: Any = container.add_stream("mpeg4", rate=_FRAMES_PER_SECOND)
        stream.width, stream.height, stream.pix_fmt = case.width, case.height, "yuv420p"
        for _ in range(case.frames):
            container.mux(
                stream.encode(av.VideoFrame.from_ndarray(_draw_image(case, random), format="rgb24"))
            )
        container.mux(stream.encode())
