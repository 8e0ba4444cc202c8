"""200 texts on which tokenizers are compared: the held-out prompts, hard ones, and drawn ones."""

from __future__ import annotations

import json
import random
from pathlib import Path

__all__ = ["HERE", "texts"]

HERE = Path(__file__).parent


def texts() -> list[str]:
    """Return the texts, the same on every machine."""
    entries = json.loads((HERE / "prompts.json").read_text(encoding="utf-8"))
    hard = json.loads((HERE / "hard_texts.json").read_text(encoding="utf-8"))
    found = [entry["prompt"] for entry in entries] + hard["hard"]
    rng, alphabets = random.Random(0), hard["alphabets"]
    while len(found) < 200:
        some = rng.sample(alphabets, rng.randint(1, len(alphabets)))
        found.append("".join(rng.choice(rng.choice(some)) for _ in range(rng.randint(1, 80))))
    return found
