"""Coloured shapes on a 3 x 3 grid of places: the small world that the tiny checkpoints see."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from PIL import Image, ImageDraw

__all__ = ["COLOURS", "PLACES", "SHAPES", "Scene", "Thing", "random_scene", "render"]

COLOURS = {
    "red": (214, 40, 40),
    "green": (44, 150, 60),
    "blue": (40, 84, 214),
    "yellow": (240, 206, 40),
    "purple": (132, 52, 168),
    "orange": (242, 132, 30),
}
BACKGROUNDS = {"white": (246, 246, 246), "black": (16, 16, 16), "gray": (128, 128, 128)}
SHAPES = ("circle", "square", "triangle", "cross", "ring")
PLACES = (
    "top left",
    "top",
    "top right",
    "left",
    "center",
    "right",
    "bottom left",
    "bottom",
    "bottom right",
)


@dataclass(frozen=True)
class Thing:
    """One coloured shape; ``place`` is its grid cell, row-major, 0 = top left."""

    colour: str
    shape: str
    place: int

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"

    @property
    def where(self) -> str:
        return PLACES[self.place]

    def at(self, place: int) -> Thing:
        return replace(self, place=place)


@dataclass(frozen=True)
class Scene:
    """Things in reading order on one background."""

    background: str
    things: tuple[Thing, ...]

    @property
    def key(self) -> str:
        """What the train/heldout split hashes: everything but size and jitter."""
        return f"{self.background}:" + ";".join(f"{t.name}@{t.place}" for t in self.things)

    def with_things(self, things: list[Thing]) -> Scene:
        return Scene(self.background, tuple(sorted(things, key=lambda t: t.place)))


def random_scene(
    rng: random.Random, count: int, *, free: tuple[int, ...] = tuple(range(9))
) -> Scene:
    """``count`` things of distinct colour-and-shape in distinct cells of ``free``."""
    places = sorted(rng.sample(free, count))
    looks = rng.sample([(c, s) for c in COLOURS for s in SHAPES], count)
    things = tuple(Thing(c, s, p) for (c, s), p in zip(looks, places, strict=True))
    return Scene(rng.choice(list(BACKGROUNDS)), things)


def _draw_shape(
    draw: ImageDraw.ImageDraw, thing: Thing, x: float, y: float, r: float, background: str
) -> None:
    fill = COLOURS[thing.colour]
    if thing.shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    elif thing.shape == "ring":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=fill)
        hole = 0.5 * r
        draw.ellipse((x - hole, y - hole, x + hole, y + hole), fill=BACKGROUNDS[background])
    elif thing.shape == "square":
        side = 0.88 * r
        draw.rectangle((x - side, y - side, x + side, y + side), fill=fill)
    elif thing.shape == "triangle":
        draw.polygon(((x, y - r), (x + r, y + 0.8 * r), (x - r, y + 0.8 * r)), fill=fill)
    else:
        arm = 0.32 * r
        draw.rectangle((x - r, y - arm, x + r, y + arm), fill=fill)
        draw.rectangle((x - arm, y - r, x + arm, y + r), fill=fill)


def render(
    scene: Scene,
    size: tuple[int, int],
    seed: int,
    moved: dict[Thing, tuple[float, float]] | None = None,
) -> Image.Image:
    """Draw ``scene``.

    Args:
        size: width, height in pixels.
        seed: places each thing within its cell and sizes it; the same seed draws the same jitter.
        moved: thing -> (column, row) in cells, fractional, in place of the thing's own cell (for
            frames).
    """
    width, height = size
    image = Image.new("RGB", size, BACKGROUNDS[scene.background])
    draw = ImageDraw.Draw(image)
    cell = min(width, height) / 3
    for index, thing in enumerate(scene.things):
        rng = random.Random(seed * 31 + index)
        radius = cell * rng.uniform(0.34, 0.44)
        column, row = (moved or {}).get(thing, (thing.place % 3, thing.place // 3))
        x = (column + 0.5) * width / 3 + rng.uniform(-0.05, 0.05) * cell
        y = (row + 0.5) * height / 3 + rng.uniform(-0.05, 0.05) * cell
        _draw_shape(
            draw, thing, math.floor(x * 4) / 4, math.floor(y * 4) / 4, radius, scene.background
        )
    return image
