"""What the tiny pairs are asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.tiny import ROOT
from trt_eagle3 import LLM
from trt_eagle3.decode.llm import Generation

__all__ = ["PROMPTS", "Prompt", "ask"]

IMAGES = ROOT / "examples/tiny/images"


@dataclass(frozen=True)
class Prompt:
    text: str
    images: tuple[Path, ...] = ()


PROMPTS = (
    Prompt("What is 12 plus 30?"),
    Prompt("List all the shapes and where they are.", (IMAGES / "scene.png",)),
)


def ask(engine: LLM, prompt: Prompt, **options: Any) -> Generation:
    return engine.generate(prompt.text, images=list(prompt.images), max_tokens=48, **options)
