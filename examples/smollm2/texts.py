"""200 texts on which tokenizers are compared: the held-out prompts, and hard ones."""

from __future__ import annotations

import json
import random
from pathlib import Path

__all__ = ["texts"]

HERE = Path(__file__).parent
HARD = (
    "",
    " ",
    "   three   spaces  ",
    "\ttabs\t\tand\nnewlines\n\n\r\nmixed \n ",
    "0 12 345 6789 3.14159 1,000,000 1e-05 0xFF",
    "x2y3 A4 b52b",
    "don't we'll they'RE I'm you'd she's IT'S",
    "naïve café Ångström Straße Œuvre",
    "Привет, мир! Καλημέρα κόσμε. שלום עולם مرحبا بالعالم",
    "你好，世界。こんにちは世界 안녕하세요 세계",
    "٣٤٥ ４５６ Ⅻ ½ x² 五",
    "👍🏽 👩‍👩‍👧‍👦 🇫🇷 e\u0301 \u200bzero\u00a0width \ufeffbom",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "<|im_end|><|endoftext|> <file_sep> <| im_end |>",
    "def f(x):\n    return {k: v**2 for k, v in x.items()}  # square\n",
    "if (a && b || !c) { d += 1; } /* no */ // yes",
    "https://example.org/a?b=c&d=%20#e user@example.org",
    "C:\\Users\\name\\file.txt ~/.bashrc $HOME",
    "¿Qué? ¡Sí! «oui» „ja“ – — … ‘a’ “b”",
    "\\frac{a}{b} = \\sum_{i=1}^{n} x_i \\leq \\sqrt{2}",
    "ALLCAPS CamelCase snake_case kebab-case",
    "a" * 60,
    "=" * 40 + "-" * 40,
    "\u0000\u0001\u007f\u0080 control",
)
ALPHABETS = (
    "abcdefghij klmnop qrstu vwxyz ",
    "0123456789 .,:;",
    " \n\t",
    "éèêüößñçàœ ",
    "абвгдежз ийклм ",
    "漢字仮名交じり文 ",
    "{}[]()<>=+-*/&|^%$#@!?~`'\"\\_ ",
    "🙂🚀🎉👍 ",
)


def texts() -> list[str]:
    """Return the texts, the same on every machine."""
    entries = json.loads((HERE / "prompts.json").read_text(encoding="utf-8"))
    found = [entry["prompt"] for entry in entries] + list(HARD)
    rng = random.Random(0)
    while len(found) < 200:
        some = rng.sample(ALPHABETS, rng.randint(1, len(ALPHABETS)))
        found.append("".join(rng.choice(rng.choice(some)) for _ in range(rng.randint(1, 80))))
    return found
