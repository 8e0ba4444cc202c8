"""How many answers each pair of features is compared in: a table of ``docs/checks.md``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import combinations_with_replacement

from tokenizers import Tokenizer

from tests.tiny import TARGET
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.parity.record.options import NUM_CASES, option_sets

HAS: Mapping[str, Callable[[SamplingParams], bool]] = {
    "grammar": lambda s: s.grammar is not None,
    "penalties": lambda s: bool(s.frequency_penalty),
    "stop texts": lambda s: bool(s.stop),
    "seed": lambda s: not s.greedy,
}
FEATURES = (*HAS, "images", "reused prefixes", "preemption")


def compared() -> Counter[tuple[str, str]]:
    """By pair of features. Of the two cases one has an image. Both rounds reuse prefixes, and the
    second has too few pages; greedy answers are compared in both, seeded ones with the first round.
    """
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    found: Counter[tuple[str, str]] = Counter()
    for sampling in option_sets([1], tokenizer).values():
        own = [name for name, has in HAS.items() if has(sampling)]
        for case in range(NUM_CASES):
            for few_pages in (False, True) if sampling.greedy else (True,):
                names = [*own, *["images"][:case], "reused prefixes", *["preemption"][:few_pages]]
                found.update(combinations_with_replacement(names, 2))
    return found


def table() -> str:
    """As Markdown: a triangle, and on its diagonal each feature by itself."""
    counts = compared()
    lines = ["| | " + " | ".join(FEATURES) + " |", "|---" * (len(FEATURES) + 1) + "|"]
    for i, first in enumerate(FEATURES):
        cells = [str(counts[first, other]) if j >= i else "" for j, other in enumerate(FEATURES)]
        lines.append("| " + " | ".join([first, *cells]) + " |")
    return "\n".join(lines)


def test_every_pair_of_features_is_compared() -> None:
    assert min(compared()[pair] for pair in combinations_with_replacement(FEATURES, 2)) > 0
