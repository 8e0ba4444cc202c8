"""Record the answers of many small engines, or compare them with an earlier record.

```
python -m benchmarks.record_answers answers.json             # before a change
python -m benchmarks.record_answers --compare answers.json   # after it
```

An answer is recorded as its token ids and accepted lengths. Nothing in it depends on time: the
configured tree is always drafted, every sampled request has a seed, and one request of a batch
arrives per step. So two runs on one machine write the same file. Another CPU or another torch may
round differently: record and compare on one machine.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle, islice, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import click
import torch

from trt_eagle3 import LLM, Generation, Grammar, Request, SamplingParams
from trt_eagle3.config import load_config
from trt_eagle3.decode import core
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.schedule.scheduler import Scheduler
from trt_eagle3.pipeline import build

__all__ = ["AnswerCase", "cases", "first_difference", "main", "record", "run_case"]

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "examples/tiny/images"
MAX_TOKENS = 20

PAIRS = {
    "tiny": ("tiny", str(ROOT / "examples/tiny/draft")),
    "moe": ("tiny_moe", str(ROOT / "examples/tiny_moe/draft")),
    "hybrid": ("tiny_hybrid", str(ROOT / "examples/tiny_hybrid/draft")),
    "hybrid-mtp": ("tiny_hybrid", "mtp"),
}
"""Name of the build config, and the draft's checkpoint."""
ENGINES = (
    ("onnxruntime", "float32", False),
    ("torch", "float32", False),
    ("torch", "float32", True),
    ("torch", "bfloat16", False),
)
"""Backend, dtype, and whether steps are launched ahead of the host."""
TREES: Mapping[str, Mapping[str, Any] | None] = {
    "chain": {"mode": "chain", "steps": 5},
    "tree": {"mode": "tree", "steps": 4, "topk": 3, "num_draft_tokens": 10},
    "dynamic": {"mode": "dynamic", "steps": 4, "topk": 3, "num_draft_tokens": 8},
    "no-draft": None,
}
"""Speculation of a build config; None: a bundle without a draft."""
BATCHES = ((8,), (1, 5), (2, 4), (3, 3), (7,), (1, 6))
"""Batch sizes of an engine, in turn by pair and tree. Batches of 7 and 8 get few pages."""


def _requests() -> dict[str, Request]:
    """Return all requests by name; batches take them in order."""
    scene = [IMAGES / "scene.png"]
    both = [IMAGES / "before.png", IMAGES / "after.png"]
    frames = [[IMAGES / f"frames/{i}.png" for i in range(4)]]
    shape = {
        "type": "object",
        "properties": {"shape": {"enum": ["circle", "ring"]}, "count": {"type": "integer"}},
        "required": ["shape", "count"],
    }
    words = "wheel coin book table cloud lamp glass tree snow key bread flower"
    reverse, swap = "Reverse the order of the words:", "Copy the words, replacing tree with boat:"

    def request(prompt: str, *, images: Any = (), videos: Any = (), **options: Any) -> Request:
        speculation = options.pop("speculation", True)
        sampling = SamplingParams(max_tokens=MAX_TOKENS, **options)
        return Request(prompt, images, videos, sampling, speculation)

    return {
        "text": request(f"{reverse} wheel coin book table cloud."),
        "image": request("List all the shapes and where they are.", images=scene),
        "text sampled": request(f"{swap} snow key tree.", temperature=2.5, seed=1),
        "images": request("What changed between the two images?", images=both),
        "json": request(  # without white space, which JSON allows everywhere
            "What is 1 + 1?",
            grammar=Grammar.json_schema(shape),
            logit_bias=dict.fromkeys((197, 198, 201, 220), -100.0),
        ),
        "video": request("Describe the video.", videos=frames),
        "penalties": request(
            f"{reverse} key key book book tree.",
            repetition_penalty=1.3,
            presence_penalty=0.5,
            frequency_penalty=0.5,
        ),
        "image sampled": request("Describe it.", images=scene, temperature=2.5, top_p=0.9, seed=2),
        "long text": request(f"{reverse} {words} {words}.", ignore_eos=True),
        "regex sampled": request(
            "Count!", grammar=Grammar.regex(r"([1-9], ){5}[0-9]"), temperature=3.0, seed=3
        ),
        "text again": request(f"{reverse} wheel coin book table lamp."),
        "video penalties sampled": request(
            "Which shape changes its color, and how?",
            videos=frames,
            temperature=2.0,
            top_k=20,
            frequency_penalty=0.4,
            seed=4,
        ),
        "images plain": request("Describe both images.", images=both, speculation=False),
        "text biased": request(
            f"{swap} tree lamp tree.", logit_bias={11: 4.0, 40: -4.0}, min_tokens=12
        ),
        "image choice": request(
            "Which color is it?", images=scene, grammar=Grammar.choice(["red", "green", "blue"])
        ),
        "images min-p sampled": request(
            "What changed?", images=both, temperature=3.0, min_p=0.05, seed=5, stop=[" right"]
        ),
        "plain sampled": request(
            f"{swap} tree coin.", temperature=2.0, seed=6, speculation=False, stop_token_ids=[13]
        ),
    }


@dataclass(frozen=True)
class AnswerCase:
    """An engine and its requests.

    Attributes:
        name: pair, backend and dtype, tree.
        config: name of its build config.
        settings: changes to that config.
        ahead: launch steps ahead of the host, as on a GPU.
        batches: names of requests; one request of a batch arrives per step.
    """

    name: str
    config: str
    settings: Mapping[str, Any]
    ahead: bool
    batches: tuple[tuple[str, ...], ...]


def cases() -> list[AnswerCase]:
    """Return all cases in the order of the record. Engines of a pair and tree share requests."""
    sizes, names = cycle(BATCHES), cycle(_requests())
    found = []
    for (pair, (config, draft)), (tree, speculation) in product(PAIRS.items(), TREES.items()):
        if speculation is None and draft == "mtp":
            continue  # the same target as the pair before
        batches = tuple(tuple(islice(names, size)) for size in next(sizes))
        few_pages = max(map(len, batches)) >= 7
        for backend, dtype, ahead in ENGINES:
            settings = {
                "target": {"checkpoint": str(ROOT / f"examples/{config}/target")},
                "draft": None if speculation is None else {"checkpoint": draft},
                "engine": {"backend": backend, "dtype": dtype, "prefill_chunk": 48},
                "limits": {"max_seq_len": 128, "max_kv_tokens": 144 if few_pages else 1024},
                "speculation": {"adaptive": False, **(speculation or {})},
                "prompts": None,
            }
            name = f"{pair}/{backend}-{dtype}{'-ahead' if ahead else ''}/{tree}"
            found.append(AnswerCase(name, config, settings, ahead, batches))
    return found


class _OnePerStep(Scheduler):
    """Takes one new sequence per step, however fast prompts are prepared.

    Only this class, ``_open`` and ``_ask`` depend on internals of the engine.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._coming: deque[SequenceState] = deque()

    @property
    def idle(self) -> bool:
        return not self._coming and super().idle

    def add(self, sequence: SequenceState) -> None:
        self._coming.append(sequence)

    def step(self) -> Any:
        if self._coming:
            super().add(self._coming.popleft())
        return super().step()


def _open(bundle: Path, *, ahead: bool) -> LLM:
    """Open an engine whose requests arrive one per step."""
    opened = LoadedBundle.open(bundle)
    engine = LLM(replace(opened, fixed_shapes=True) if ahead else opened)
    with patch.object(core, "Scheduler", _OnePerStep):
        engine.start()
    return engine


def _ask(engine: LLM, requests: Sequence[Request]) -> list[Generation]:
    """Return the answers of a batch; all ``requests`` are prepared before the first step."""
    answers = engine._started().submit_together(requests, engine)
    return [answer.finish() for answer in answers]


@dataclass(frozen=True)
class Recorded:
    """The answers of a case by name, and its preemptions and reused prompt tokens."""

    answers: Mapping[str, Mapping[str, Sequence[int]]]
    num_preempted: int
    num_reused: int


def run_case(case: AnswerCase) -> Recorded:
    """Build the engine of ``case`` and record its answers."""
    torch.set_num_threads(1)
    answers: dict[str, Mapping[str, Sequence[int]]] = {}
    requests = _requests()
    with TemporaryDirectory() as folder:
        config = load_config(ROOT / f"build_configs/{case.config}.yaml", settings=case.settings)
        path = build(config, output=Path(folder), reference_weights=True).path
        with _open(path, ahead=case.ahead) as engine:
            for i, batch in enumerate(case.batches):
                found = _ask(engine, [requests[name] for name in batch])
                for j, (name, answer) in enumerate(zip(batch, found, strict=True)):
                    answers[f"{case.name}: {i}.{j} {name}"] = {
                        "tokens": answer.token_ids,
                        "accepted": answer.accepted_lengths,
                    }
            now = engine.metrics()
    return Recorded(answers, now.preempted, now.reused_tokens)


def record(chosen: Sequence[AnswerCase], processes: int) -> Iterator[Recorded]:
    """Run the cases in ``processes`` processes, 1: this one. Results keep the order."""
    if processes == 1:
        yield from map(run_case, chosen)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        yield from pool.map(run_case, chosen)


def as_text(answers: Mapping[str, Any]) -> str:
    """Format answers as JSON, one answer per line."""
    lines = (f"{json.dumps(name)}: {json.dumps(answer)}" for name, answer in answers.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describe the first answer that differs or is in one record only; None if they are equal."""
    for name in [*now, *(name for name in before if name not in now)]:
        if name not in before or name not in now:
            return f"{name}: only in the {'new' if name in now else 'old'} record"
        for part, old in before[name].items():
            new = now[name][part]
            if old != new:
                places = zip([*old, None], [*new, None], strict=False)
                place = next(i for i, (a, b) in enumerate(places) if a != b)
                return f"{name}: {part} differ from {place} on: {old} before, {new} now"
    return None


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), required=False)
@click.option(
    "--compare",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="An earlier record: exit 1 and name the first answer that differs.",
)
@click.option("--only", default="", help="Only the engines whose name contains this.")
@click.option("--processes", default=min(2, os.cpu_count() or 1), show_default=True)
def main(file: Path | None, compare: Path | None, only: str, processes: int) -> None:
    """Write the record to FILE, or compare it with an earlier one, or both."""
    chosen = [case for case in cases() if only in case.name]
    if not chosen:
        raise click.UsageError(f"--only: no engine's name contains {only!r}")
    answers: dict[str, Mapping[str, Sequence[int]]] = {}
    start, preempted, reused = time.perf_counter(), 0, 0
    for found in record(chosen, processes):
        answers.update(found.answers)
        preempted, reused = preempted + found.num_preempted, reused + found.num_reused
    if not only and not (preempted and reused):
        raise click.ClickException("nothing was preempted, or no prefix reused: change the limits")
    text = as_text(answers)
    click.echo(
        f"{len(answers)} answers of {len(chosen)} engines, {preempted} preemptions, "
        f"{reused} prompt tokens reused, {time.perf_counter() - start:.0f} s"
    )
    if file is not None:
        file.write_text(text)
    if compare is not None:
        before = json.loads(compare.read_text())
        asked = {name: a for name, a in before.items() if only in name.partition(":")[0]}
        difference = first_difference(asked, json.loads(text))
        if difference:
            raise click.ClickException(difference)
        click.echo(f"equal to {compare}")


if __name__ == "__main__":
    main()
