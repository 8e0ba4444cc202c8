"""Questions with exact answers: text only, one image, two images, or a short frame sequence.

``examples`` is the entry point. The same (split, seed, n, kinds) gives the same examples on every
machine with the same Pillow; nothing is downloaded.

Train and held-out are disjoint by construction: every example has a key (the scene or scenes
without size and jitter, or the text problem's operands); a key whose SHA-256 starts with a byte
divisible by 10 is held out. A held-out scene or problem is therefore never seen in training under
any wording or rendering.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from PIL import Image
from scenes import COLOURS, PLACES, SHAPES, Scene, Thing, random_scene, render

__all__ = ["KINDS", "Example", "Kind", "Split", "examples"]

Kind = Literal["text", "image", "two_images", "frames"]
Split = Literal["train", "heldout"]
KINDS: tuple[Kind, ...] = ("text", "image", "two_images", "frames")

NUMBERS = ("no", "one", "two", "three", "four", "five")
SIZES = ((64, 64), (96, 64), (64, 96), (96, 96), (128, 96), (96, 128), (128, 64), (64, 128))
FRAME_SIZES = ((64, 64), (96, 64), (64, 96), (96, 96))
WORD_LIST = (
    "apple bird boat book bread chair cloud coin door fish flower glass house key lamp moon paper "
    "river shoe snow spoon star stone table tree water wheel window"
)
WORDS = tuple(WORD_LIST.split())
STEPS = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}


@dataclass(frozen=True)
class Example:
    """One question. ``images`` and ``frames`` are never both filled; frames are in time order."""

    kind: Kind
    prompt: str
    images: tuple[Image.Image, ...]
    frames: tuple[Image.Image, ...]
    answer: str


@dataclass(frozen=True)
class Plan:
    """An example before its images are drawn: ``draw`` returns (images, frames)."""

    key: str
    prompt: str
    answer: str
    draw: Callable[[], tuple[tuple[Image.Image, ...], tuple[Image.Image, ...]]]


def examples(split: Split, seed: int, n: int, kinds: tuple[Kind, ...] = KINDS) -> Iterator[Example]:
    """Yield ``n`` examples; each one's kind is drawn uniformly from ``kinds`` (repeat a kind to
    weight it).
    """
    rng = random.Random(f"{split}/{seed}")
    for _ in range(n):
        kind = rng.choice(kinds)
        while _is_heldout((plan := _MAKERS[kind](rng)).key) != (split == "heldout"):
            pass
        images, frames = plan.draw()
        yield Example(kind, plan.prompt, images, frames, plan.answer)


def _is_heldout(key: str) -> bool:
    return hashlib.sha256(key.encode()).digest()[0] % 10 == 0


def _nothing() -> tuple[tuple[Image.Image, ...], tuple[Image.Image, ...]]:
    return (), ()


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _placed(thing: Thing) -> str:
    return f"{_a(thing)} at the {thing.where}"


def _a(thing: Thing) -> str:
    return f"{'an' if thing.colour[0] in 'aeiou' else 'a'} {thing.name}"


def _plural(count: int, noun: str) -> str:
    return f"{NUMBERS[count]} {noun}" if count == 1 else f"{NUMBERS[count]} {noun}s"


def _describe(scene: Scene) -> str:
    verb = "is" if len(scene.things) == 1 else "are"
    listed = _join([_placed(t) for t in scene.things])
    return f"There {verb} {_plural(len(scene.things), 'shape')}: {listed}."


# ---- text


def _text(rng: random.Random) -> Plan:
    return rng.choice((_arithmetic, _sort, _replace_word, _reverse))(rng)


def _arithmetic(rng: random.Random) -> Plan:
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    if rng.random() < 0.5:
        word, result = "plus", a + b
    else:
        a, b = max(a, b), min(a, b)
        word, result = "minus", a - b
    ask = rng.choice(("What is {}?", "Compute {}.", "Please calculate {}.", "How much is {}?"))
    sum_text = f"{a} {word} {b}"
    return Plan(f"{word} {a} {b}", ask.format(sum_text), f"{sum_text} equals {result}.", _nothing)


def _sort(rng: random.Random) -> Plan:
    numbers = rng.sample(range(1, 100), rng.randint(3, 5))
    order = rng.choice(("ascending", "descending"))
    ordered = sorted(numbers, reverse=order == "descending")
    listed = ", ".join(map(str, numbers))
    ask = rng.choice(("Sort these numbers in {} order: {}.", "Put these numbers in {} order: {}."))
    answer = f"The numbers in {order} order are {', '.join(map(str, ordered))}."
    return Plan(f"{order} {listed}", ask.format(order, listed), answer, _nothing)


def _replace_word(rng: random.Random) -> Plan:
    words = rng.sample(WORDS, rng.randint(4, 7))
    new = words.pop()
    old = rng.choice(words)
    edited = " ".join(new if w == old else w for w in words)
    ask = rng.choice(
        ("Copy the words, replacing {} with {}: {}.", "Repeat the words with {} changed to {}: {}.")
    )
    key = f"replace {old} {new} {' '.join(words)}"
    return Plan(
        key, ask.format(old, new, " ".join(words)), f"The edited words are {edited}.", _nothing
    )


def _reverse(rng: random.Random) -> Plan:
    words = rng.sample(WORDS, rng.randint(3, 6))
    listed = " ".join(words)
    ask = rng.choice(
        ("Write these words in reverse order: {}.", "Reverse the order of the words: {}.")
    )
    answer = f"The words in reverse order are {' '.join(reversed(words))}."
    return Plan(f"reverse {listed}", ask.format(listed), answer, _nothing)


# ---- one image


def _image(rng: random.Random) -> Plan:
    scene = random_scene(rng, rng.choice((1, 2, 2, 3, 3, 4)))
    prompt, answer = rng.choice(
        (_ask_all, _ask_all, _ask_count, _ask_where, _ask_what, _ask_whether)
    )(rng, scene)
    size, seed = rng.choice(SIZES), rng.randrange(2**30)
    return Plan(scene.key, prompt, answer, lambda: ((render(scene, size, seed),), ()))


def _ask_all(rng: random.Random, scene: Scene) -> tuple[str, str]:
    ask = (
        "Describe the image.",
        "What do you see in this image?",
        "List all the shapes and where they are.",
    )
    return rng.choice(ask), f"The background is {scene.background}. {_describe(scene)}"


def _ask_count(rng: random.Random, scene: Scene) -> tuple[str, str]:
    colour = rng.choice((rng.choice(scene.things).colour, rng.choice(list(COLOURS))))
    found = [t for t in scene.things if t.colour == colour]
    ask = rng.choice(("How many {} shapes are there?", "Count the {} shapes in the image."))
    verb = "is" if len(found) == 1 else "are"
    answer = (
        f"There {verb} {_plural(len(found), colour + ' shape')} among the "
        f"{_plural(len(scene.things), 'shape')}"
    )
    return ask.format(colour), f"{answer} in the image."


def _ask_where(rng: random.Random, scene: Scene) -> tuple[str, str]:
    thing = rng.choice(scene.things)
    ask = rng.choice(("Where is the {}?", "In which part of the image is the {}?"))
    return ask.format(thing.name), f"The {thing.name} is at the {thing.where} of the image."


def _ask_what(rng: random.Random, scene: Scene) -> tuple[str, str]:
    place = rng.choice((rng.choice(scene.things).place, rng.randrange(9)))
    found = [t for t in scene.things if t.place == place]
    ask = rng.choice(("What is at the {}?", "Which shape is at the {} of the image?"))
    answer = (
        f"There is {_placed(found[0])}."
        if found
        else f"There is nothing at the {PLACES[place]} of the image."
    )
    return ask.format(PLACES[place]), answer


def _ask_whether(rng: random.Random, scene: Scene) -> tuple[str, str]:
    thing = rng.choice(scene.things)
    if rng.random() < 0.5:
        thing = Thing(rng.choice(list(COLOURS)), rng.choice(SHAPES), 0)
    found = [t for t in scene.things if t.name == thing.name]
    ask = rng.choice(("Is there {} in the image?", "Does the image contain {}?")).format(_a(thing))
    if found:
        return ask, f"Yes, there is {_placed(found[0])} of the image."
    return ask, f"No, there is no {thing.name} in the image."


# ---- two images


def _two_images(rng: random.Random) -> Plan:
    maker = rng.choice((_both, _more, _which_contains, _change))
    first, second, prompt, answer = maker(rng)
    sizes, seeds = (
        [rng.choice(SIZES), rng.choice(SIZES)],
        [rng.randrange(2**30), rng.randrange(2**30)],
    )
    if maker is _change:
        sizes[1], seeds[1] = sizes[0], seeds[0]

    def draw() -> tuple[tuple[Image.Image, ...], tuple[Image.Image, ...]]:
        return (render(first, sizes[0], seeds[0]), render(second, sizes[1], seeds[1])), ()

    return Plan(f"{first.key}|{second.key}", prompt, answer, draw)


def _both(rng: random.Random) -> tuple[Scene, Scene, str, str]:
    first, second = random_scene(rng, rng.randint(1, 2)), random_scene(rng, rng.randint(1, 2))
    shown = [_join([_placed(t) for t in s.things]) for s in (first, second)]
    ask = rng.choice(("Describe both images.", "What do the two images show?"))
    return (
        first,
        second,
        ask,
        f"The first image shows {shown[0]}. The second image shows {shown[1]}.",
    )


def _more(rng: random.Random) -> tuple[Scene, Scene, str, str]:
    counts = rng.sample((1, 2, 3, 4), 2)
    first, second = random_scene(rng, counts[0]), random_scene(rng, counts[1])
    name = "first" if counts[0] > counts[1] else "second"
    ask = rng.choice(
        ("Which image has more shapes?", "Which of the two images contains more shapes?")
    )
    totals = f"{NUMBERS[max(counts)]} shapes against {NUMBERS[min(counts)]}"
    return first, second, ask, f"The {name} image has more shapes: {totals}."


def _which_contains(rng: random.Random) -> tuple[Scene, Scene, str, str]:
    first, second = random_scene(rng, rng.randint(1, 3)), random_scene(rng, rng.randint(1, 3))
    name, scene, other = rng.choice((("first", first, second), ("second", second, first)))
    thing = rng.choice(scene.things)
    if thing.name in {t.name for t in other.things}:
        return _which_contains(rng)
    ask = rng.choice(("Which image contains {}?", "In which image is there {}?")).format(_a(thing))
    return (
        first,
        second,
        ask,
        f"The {name} image contains {_placed(thing)}, the other image does not.",
    )


def _change(rng: random.Random) -> tuple[Scene, Scene, str, str]:
    first = random_scene(rng, rng.randint(1, 3))
    old = rng.choice(first.things)
    new = Thing(rng.choice(list(COLOURS)), rng.choice(SHAPES), old.place)
    if new.name in {t.name for t in first.things}:
        return _change(rng)
    second = first.with_things([new if t == old else t for t in first.things])
    ask = rng.choice(
        ("What is different in the second image?", "What changed between the two images?")
    )
    return (
        first,
        second,
        ask,
        f"In the second image the {old.name} at the {old.where} is replaced by {_a(new)}.",
    )


# ---- frames


def _frames(rng: random.Random) -> Plan:
    event = rng.choice((_move, _move, _appear, _recolour))
    return event(rng, rng.randint(2, 8), rng.choice(FRAME_SIZES), rng.randrange(2**30))


def _staying(scene: Scene, but: Thing) -> str:
    others = [f"the {t.name} stays at the {t.where}" for t in scene.things if t != but]
    return f", while {_join(others)}" if others else ""


def _ask_event(rng: random.Random, own: str) -> str:
    return rng.choice((own, "What happens in the video?", "Describe the video."))


def _move(rng: random.Random, n: int, size: tuple[int, int], seed: int) -> Plan:
    heading, (dx, dy) = rng.choice(list(STEPS.items()))
    length, lane = rng.randint(1, 2), rng.randrange(3)
    start_along = rng.randint(0, 2 - length) if dx + dy > 0 else rng.randint(length, 2)
    start = (start_along, lane) if dx else (lane, start_along)
    end = (start[0] + dx * length, start[1] + dy * length)
    in_lane = {3 * lane + i if dx else 3 * i + lane for i in range(3)}
    rest = random_scene(rng, rng.randint(0, 2), free=tuple(p for p in range(9) if p not in in_lane))
    mover = Thing(rng.choice(list(COLOURS)), rng.choice(SHAPES), 3 * start[1] + start[0])
    if mover.name in {t.name for t in rest.things}:
        return _move(rng, n, size, seed)
    scene = rest.with_things([*rest.things, mover])

    def draw() -> tuple[tuple[Image.Image, ...], tuple[Image.Image, ...]]:
        steps = [i * length / (n - 1) for i in range(n)]
        return (), tuple(
            render(scene, size, seed, {mover: (start[0] + dx * step, start[1] + dy * step)})
            for step in steps
        )

    answer = (
        f"The {mover.name} moves {heading} from the {mover.where} to the "
        f"{PLACES[3 * end[1] + end[0]]}"
    )
    prompt = _ask_event(rng, "Which shape moves, and in which direction?")
    return Plan(
        f"move {heading} {length} {mover} {scene.key}",
        prompt,
        answer + _staying(scene, mover) + ".",
        draw,
    )


def _appear(rng: random.Random, n: int, size: tuple[int, int], seed: int) -> Plan:
    scene = random_scene(rng, rng.randint(2, 3))
    thing, change = rng.choice(scene.things), rng.randint(1, n - 1)
    appears = rng.random() < 0.5

    def draw() -> tuple[tuple[Image.Image, ...], tuple[Image.Image, ...]]:
        with_it = [render(scene, size, seed), render(scene, size, seed, {thing: (-9, -9)})]
        return (), tuple(with_it[(i >= change) != appears] for i in range(n))

    verb = "appears" if appears else "disappears"
    answer = f"The {thing.name} {verb} at the {thing.where}{_staying(scene, thing)}."
    prompt = _ask_event(rng, f"Which shape {verb}, and where?")
    return Plan(f"{verb} {thing} {scene.key}", prompt, answer, draw)


def _recolour(rng: random.Random, n: int, size: tuple[int, int], seed: int) -> Plan:
    scene = random_scene(rng, rng.randint(1, 2))
    old, change = rng.choice(scene.things), rng.randint(1, n - 1)
    new = Thing(rng.choice([c for c in COLOURS if c != old.colour]), old.shape, old.place)
    if new.name in {t.name for t in scene.things}:
        return _recolour(rng, n, size, seed)
    after = scene.with_things([new if t == old else t for t in scene.things])

    def draw() -> tuple[tuple[Image.Image, ...], tuple[Image.Image, ...]]:
        drawn = render(scene, size, seed), render(after, size, seed)
        return (), tuple(drawn[i >= change] for i in range(n))

    answer = (
        f"The {old.shape} at the {old.where} changes from {old.colour} to "
        f"{new.colour}{_staying(scene, old)}."
    )
    prompt = _ask_event(rng, "Which shape changes its color, and how?")
    return Plan(f"recolour {old} {new.colour} {scene.key}", prompt, answer, draw)


_MAKERS: dict[Kind, Callable[[random.Random], Plan]] = {
    "text": _text,
    "image": _image,
    "two_images": _two_images,
    "frames": _frames,
}
