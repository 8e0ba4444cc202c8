"""Default prompts: questions in plain text, and questions about images that code draws on use."""

from __future__ import annotations

from PIL import Image, ImageDraw

from trt_eagle3.prompts.prompt_file import Question

__all__ = ["bundled_questions"]

_TEXTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper and a lost ship.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
)


def bundled_questions(*, vision: bool = True) -> list[Question]:
    """Return three questions about text; with ``vision`` also three about images and a video.

    Those have one image, two images, and one video.
    """
    texts = [Question(text) for text in _TEXTS]
    if not vision:
        return texts
    frames = [_shapes(number) for number in range(4)]
    return [
        *texts,
        Question(
            "Describe the picture: its shapes, their colors and where they are.", [_shapes(0)]
        ),
        Question("What changed between the two images?", [_shapes(1), _bars()]),
        Question("Describe the video.", videos=[frames]),
    ]


def _shapes(step: int) -> Image.Image:
    """Draw a square that moves right with ``step``, a circle and a triangle."""
    image = Image.new("RGB", (256, 192), "white")
    draw = ImageDraw.Draw(image)
    left = 16 + 40 * step
    draw.rectangle((left, 24, left + 56, 80), fill="red")
    draw.ellipse((24, 112, 88, 176), fill="blue")
    draw.polygon([(168, 176), (200, 112), (232, 176)], fill="green")
    return image


def _bars() -> Image.Image:
    """Draw a bar chart of four bars."""
    image = Image.new("RGB", (192, 256), "white")
    draw = ImageDraw.Draw(image)
    for index, (height, colour) in enumerate(
        ((60, "orange"), (150, "purple"), (100, "teal"), (200, "black"))
    ):
        draw.rectangle((16 + 44 * index, 240 - height, 48 + 44 * index, 240), fill=colour)
    return image
