"""Write the demo images: held-out scenes that no training batch contained."""

from __future__ import annotations

import json
from pathlib import Path

from tasks import Example, Kind, examples

__all__ = ["save_demo"]

DEMO_SEED = 7


def _first(kind: Kind, phrase: str, num_frames: int = 0) -> Example:
    """The first held-out example of ``kind`` whose answer has ``phrase`` on images of at least
    96 pixels a side.
    """
    for example in examples("heldout", DEMO_SEED, 1000, (kind,)):
        big = all(min(picture.size) >= 96 for picture in example.images + example.frames)
        if (
            big
            and phrase in example.answer
            and len(example.frames) == num_frames
            and example.answer.count(" the ") > 1
        ):
            return example
    raise LookupError(f"no held-out {kind} example with {num_frames} frames says {phrase!r}")


def save_demo(folder: Path) -> None:
    """scene.png, before.png, after.png, frames/*.png, and questions.json with the exact answers."""
    (folder / "frames").mkdir(parents=True, exist_ok=True)
    scene, pair, moving = (
        _first("image", "The background"),
        _first("two_images", "In the second"),
        _first("frames", "moves", 4),
    )
    questions = []
    for example, names in ((scene, ["scene.png"]), (pair, ["before.png", "after.png"])):
        for image, name in zip(example.images, names, strict=True):
            image.save(folder / name, optimize=True)
        questions.append({"images": names, "prompt": example.prompt, "answer": example.answer})
    names = [f"frames/{i}.png" for i in range(len(moving.frames))]
    for frame, name in zip(moving.frames, names, strict=True):
        frame.save(folder / name, optimize=True)
    questions.append({"frames": names, "prompt": moving.prompt, "answer": moving.answer})
    (folder / "questions.json").write_text(json.dumps(questions, indent=2) + "\n", encoding="utf-8")
