"""The prompts of a validation: prompts of every kind, with images that code draws on use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from trt_eagle3.errors import UserError
from trt_eagle3.multimodal import Video
from trt_eagle3.parity.record.engine import RecordingEngine
from trt_eagle3.prompts.kept import kept_file
from trt_eagle3.prompts.prompt_file import Question, read_questions

__all__ = ["QUICK_LONG_TOKENS", "Case", "bundled_cases", "left_out", "draw_image", "read_cases"]

QUICK_LONG_TOKENS = 1024
"""Length limit of the quick suite's longest prompt: the reference runs it on the CPU too."""


_LONG = "long context"


@dataclass(frozen=True)
class Case:
    """A named prompt.

    Attributes:
        kind: the feature that it covers.
        own: it is the user's, from the bundle or a prompt file.
    """

    name: str
    kind: str
    question: Question
    own: bool = False


def read_cases(file: Path) -> list[Case]:
    """Read the user's own prompts (``trt_eagle3/prompts/prompt_file.py``)."""
    questions = read_questions(file)
    return [Case(f"{file.name}[{i}]", _kind(q), q, own=True) for i, q in enumerate(questions)]


def _kind(question: Question) -> str:
    if question.videos:
        return "video"
    return ("text", "image")[len(question.images)] if len(question.images) < 2 else "images"


def bundled_cases(suite: str, engine: RecordingEngine, max_tokens: int) -> list[Case]:
    """Return the prompts that this bundle keeps, and those of the suite that fit its limits.

    The long prompt is as long as the limits allow.

    Raises:
        UserError: none of the prompts fit the bundle's limits.
    """
    kept = kept_file(engine.path)
    own = read_cases(kept) if kept else []
    drawn = [*own, *_quick(), *(_full() if suite == "full" else ())]
    cases = [case for case in drawn if _fits(engine, case.question, max_tokens)]
    limit = (
        engine.limits.max_seq_len
        if suite == "full"
        else min(engine.limits.max_seq_len, QUICK_LONG_TOKENS)
    )
    long = _long(engine, limit - max_tokens)
    if long is not None:
        cases.append(Case(_LONG, "long", long))
    if not cases:
        raise UserError(
            f"{engine.path}: limits.max_seq_len {engine.limits.max_seq_len} fits none of the "
            f"bundled prompts with {max_tokens} answer tokens. Give shorter ones: --prompts FILE"
        )
    return cases


def left_out(suite: str, cases: Sequence[Case]) -> list[str]:
    """Return names of a suite's prompts that exceed the bundle's limits: not in ``cases``."""
    ran = {case.name for case in cases}
    drawn = [*_quick(), *(_full() if suite == "full" else ())]
    return [name for name in (*(case.name for case in drawn), _LONG) if name not in ran]


def _quick() -> Iterator[Case]:
    yield Case("text", "text", Question("Explain in two sentences why the sky is blue."))
    yield Case(
        "non-Latin text",
        "text",
        Question("用一句话介绍北京。 Что такое море? ما هو القمر؟ 🌊 नमस्ते"),
    )
    # these two prompts differ only in the image
    same = "Describe the picture: its shapes and where they are."
    yield Case("image", "image", Question(same, [draw_image(0)]))
    yield Case("another image", "image", Question(same, [draw_image(14)]))
    two = [draw_image(1), draw_image(2, (96, 160))]
    yield Case("two images", "images", Question("What changed between the two images?", two))
    yield Case("wide image", "aspect", Question("What do you see?", [draw_image(3, (384, 32))]))
    yield Case("video", "video", Question("Describe the video.", videos=[_frames(4, (64, 96))]))


def _full() -> Iterator[Case]:
    yield Case(
        "code", "text", Question("Write a Python function that returns the n-th Fibonacci number.")
    )
    yield Case("sum", "text", Question("What is 12 plus 30?"))
    yield Case(
        "numbers and symbols",
        "text",
        Question("3.14159 <= x^2 + {y: [1, 2]} \\ \t~ \u2211\u221e \u00bd?"),
    )
    yield Case("tall image", "aspect", Question("What do you see?", [draw_image(4, (32, 480))]))
    yield Case("small image", "aspect", Question("What do you see?", [draw_image(5, (17, 23))]))
    yield Case(
        "large image", "image", Question("Describe the picture.", [draw_image(6, (640, 448))])
    )
    four = [
        draw_image(7),
        draw_image(8, (160, 96)),
        draw_image(9, (96, 96)),
        draw_image(10, (224, 64)),
    ]
    yield Case("four images", "images", Question("Which of these pictures is the brightest?", four))
    yield Case("odd video", "video", Question("What moves?", videos=[_frames(7, (96, 64))]))
    timed = Video(_frames(3, (64, 64)), timestamps=[0.0, 1.5, 7.25])
    yield Case("video with times", "video", Question("When does it move?", videos=[timed]))
    mixed = Question(
        "Is the picture part of the video?", [draw_image(11, (64, 96))], [_frames(4, (64, 96))]
    )
    yield Case("image and video", "video", mixed)


def draw_image(seed: int, size: tuple[int, int] = (160, 128)) -> Image.Image:
    """Draw shapes on a noisy ramp, ``size`` (width, height); depends only on ``seed``."""
    width, height = size
    generator = np.random.default_rng(seed)
    y, x, channel = np.ogrid[:height, :width, :3]
    ramp = (x * (2 + channel) + y * (3 + seed) + 40 * channel) % 256
    image = Image.fromarray(
        np.clip(ramp * 0.6 + generator.normal(40, 12, ramp.shape), 0, 255).astype(np.uint8)
    )
    draw = ImageDraw.Draw(image)
    for fill in ("red", "blue", "white"):
        left, top = int(generator.integers(0, width)), int(generator.integers(0, height))
        side = max(4, min(width, height) // 3)
        shape = draw.ellipse if generator.integers(2) else draw.rectangle
        shape((left - side // 2, top - side // 2, left + side // 2, top + side // 2), fill=fill)
    return image


def _frames(count: int, size: tuple[int, int]) -> list[Image.Image]:
    """Draw a square that moves over a still image; processors keep such sizes."""
    frames = []
    for step in range(count):
        frame = draw_image(20, size)
        left = step * (size[0] - 16) // max(1, count - 1)
        ImageDraw.Draw(frame).rectangle((left, 24, left + 16, 40), fill="yellow")
        frames.append(frame)
    return frames


def _fits(engine: RecordingEngine, question: Question, max_tokens: int) -> bool:
    try:
        inputs = engine.prepare(question.prompt, question.images, question.videos)
    except UserError:
        return False
    return len(inputs.token_ids) + max_tokens <= engine.limits.max_seq_len


_SENTENCES = (
    "The keeper of the lighthouse counted {} ships before the fog came in.",
    "Every morning she wrote the number {} into a small green book.",
    "On day {} the wind turned, and the gulls flew inland.",
    "He walked {} steps to the shore and back again.",
)


def _long(engine: RecordingEngine, num_tokens: int) -> Question | None:
    """Return a text of nearly ``num_tokens`` tokens and never more; None if none fits."""

    def length(count: int) -> int:
        return len(engine.processor.prompt(_story(count)).token_ids)

    try:
        if length(1) > num_tokens:
            return None
        most = _largest(lambda count: length(count) <= num_tokens, num_tokens)
    except UserError:
        return None
    return Question(_story(most))


def _story(count: int) -> str:
    text = " ".join(_SENTENCES[i % len(_SENTENCES)].format(17 * i % 1000) for i in range(count))
    return f"{text} How many ships were there on the first day?"


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest count of 1 .. ``most`` that ``holds``; 1 always does."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        try:
            fits = holds(middle)
        except UserError:  # longer than the bundle's own limit
            fits = False
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
