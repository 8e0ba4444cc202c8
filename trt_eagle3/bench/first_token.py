"""Time to the first token of prompts with images and videos: ``trt-eagle3 bench BUNDLE --images``.

JPEG and MPEG-4 files, new ones each time, an idle engine, one token asked for. Preparation and the
vision tower are measured alone too, over files of the same kind. transformers may answer the same
files in the same run.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from rich.table import Table

from trt_eagle3.bench.workload import Progress, open_engine
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.preprocess import PromptPreprocessor
from trt_eagle3.decode.sampling_params import SamplingParams
from trt_eagle3.decode.vision_encoder import VisionEncoder
from trt_eagle3.engine.machine import machine_name
from trt_eagle3.errors import EnvironmentMissingError, UserError

__all__ = ["FirstTokenReport", "first_token"]

_ONE_TOKEN = SamplingParams(max_tokens=1)
_PROMPT = "What is in this picture?"
_WARM_ROUNDS = 2
_ROUNDS = 4
_QUALITY = 90  # of the JPEGs, about what phones write
_FRAMES_PER_SECOND = 2  # what Qwen3-VL samples, so that every frame is kept


@dataclass(frozen=True)
class _Case:
    """One kind of prompt: ``count`` images of a size, or with ``frames`` one video."""

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
        prompt_tokens: of the prompt. prepare: decoding, resizing, cutting and tokenising, alone.
        vision: the vision tower alone.
        total: from the request to its token. peer: the same of the other program, None where there
            is none.
    """

    case: str
    prompt_tokens: int
    prepare: float
    vision: float
    total: float
    peer: float | None = None


@dataclass(frozen=True)
class FirstTokenReport:
    """What was measured; ``left_out``: kinds of prompts that the bundle's limits do not take,
    and why.
    """

    machine: str
    peer: str | None
    rows: tuple[FirstTokenRow, ...]
    left_out: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    def table(self) -> Table:
        """For people."""
        peers = [self.peer, "ratio"] if self.peer else []
        table = Table(
            f"first token, {self.machine}", "tokens", "prepare", "vision", "total ms", *peers
        )
        for row in self.rows:
            parts = [f"{value:.1f}" for value in (row.prepare, row.vision, row.total)]
            if row.peer is not None:
                parts += [f"{row.peer:.1f}", f"{row.peer / row.total:.2f}"]
            table.add_row(row.case, str(row.prompt_tokens), *parts)
        return table


class _Peer(Protocol):
    """Another program that answers with one token."""

    def answer(self, images: list[Path], videos: list[Path]) -> None: ...


def first_token(
    bundle: Path, *, against: str | None = None, progress: Progress = lambda *_: None
) -> FirstTokenReport:
    """Measure a bundle.

    Args:
        against: ``transformers``, to measure the bundle's own checkpoint there too.
    Raises:
        UserError: anything wrong with the bundle, a target that reads text only, or an unknown
            peer.
        EnvironmentMissingError: transformers cannot prepare images here.
    """
    if against not in {None, "transformers"}:
        raise UserError(f"--against {against}: expected transformers")
    if against and find_spec("torchvision") is None:
        raise EnvironmentMissingError(
            "--against transformers: its processors want torchvision. Run: pip install torchvision"
        )
    engine = open_engine(bundle)
    rows, left_out = [], {}
    try:
        if engine.bundle.spec.vision is None:
            raise UserError(f"{bundle}: its target reads text only. Leave --images out.")
        engine.start()
        peer = _Transformers(engine) if against else None
        for number, case in enumerate(_CASES):
            progress("cases", number, len(_CASES))
            try:
                rows.append(_measure(engine, case, peer))
            except (UserError, EnvironmentMissingError) as error:
                left_out[str(case)] = str(error)
        progress("cases", 1, 1)
        return FirstTokenReport(machine_name(engine.bundle.device), against, tuple(rows), left_out)
    finally:
        engine.close()


def _measure(engine: LLM, case: _Case, peer: _Peer | None) -> FirstTokenRow:
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


def _ask_peer(peer: _Peer, case: _Case, files: list[Path]) -> None:
    media = _media(case, files)
    peer.answer(media.get("images", []), media.get("videos", []))


@torch.inference_mode()
def _vision_ms(engine: LLM, case: _Case, files: Iterator[list[Path]]) -> float:
    """From prepared bytes to embeddings on the device."""
    prepared = (
        engine.prepare(_PROMPT, **_media(case, next(files))) for _ in range(_WARM_ROUNDS + _ROUNDS)
    )
    preprocessor, encoder = PromptPreprocessor(engine.bundle), VisionEncoder(engine.bundle)
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
    """Files of a case, new ones at each turn; they are made before the clock runs."""
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
                Image.fromarray(_picture(case, random)).save(file, quality=_QUALITY)
            given.append(file)
        yield given


def _picture(case: _Case, random: np.random.Generator) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Smooth shapes with some noise, as photos have."""
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
                stream.encode(av.VideoFrame.from_ndarray(_picture(case, random), format="rgb24"))
            )
        container.mux(stream.encode())


class _Transformers:
    """The bundle's checkpoint in transformers, on the same device in the same type."""

    def __init__(self, engine: LLM) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        checkpoint = engine.bundle.record.sources["target"].path
        self._processor = AutoProcessor.from_pretrained(engine.bundle.path / "processor")
        model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=engine.bundle.dtype)
        self._model = model.to(engine.bundle.device).eval()

    @torch.inference_mode()
    def answer(self, images: list[Path], videos: list[Path]) -> None:
        """One token, chosen greedily."""
        content: list[dict[str, str]] = [{"type": "image", "image": str(file)} for file in images]
        content += [{"type": "video", "video": str(file)} for file in videos]
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": _PROMPT}]}]
        inputs = self._processor.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        ).to(self._model.device)
        self._model.generate(**inputs, max_new_tokens=1, do_sample=False)[:, -1].tolist()
