"""Acceptance, tokens and speed on prompts of several kinds: ``python -m benchmarks.real_text``.

```
python -m benchmarks.real_text engines/smollm2 --output real_text.json
```

Every prompt is answered greedily with and without speculation, and at temperature 0.7. The tree of
the build config is always drafted. Each greedy token must be the one that transformers prefers in
float32 after the tokens before it, or tie with it within ``validate``'s limit for the bundle's
dtype. Last, tokens per second are measured against transformers in the same run (``bench
--against``), over the first prompt of each kind.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from trt_eagle3 import LLM, Generation, SamplingParams
from trt_eagle3.bench.against import against
from trt_eagle3.bench.peers.job import PeerOptions
from trt_eagle3.decode.policy.protocol import FixedPolicy
from trt_eagle3.decode.speculation.tree import configured_tree
from trt_eagle3.errors import CheckFailedError, UserError
from trt_eagle3.io.run_command import run_command
from trt_eagle3.parity.checks.thresholds import THRESHOLDS

__all__ = ["main", "margin_ratios", "mean_length"]

ROOT = Path(__file__).parent.parent
Answers = Mapping[str, Sequence[Generation]]
"""By kind of prompt."""


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--prompts",
    "file",
    type=click.Path(path_type=Path),
    default=ROOT / "examples/smollm2/prompts.json",
    help="A JSON list of {prompt, kind}.  [default: examples/smollm2/prompts.json]",
)
@click.option("--per-kind", default=12, show_default=True, help="At most so many prompts a kind.")
@click.option("--max-tokens", default=128, show_default=True, help="Tokens of an answer.")
@click.option("--rounds", default=3, show_default=True, help="Of the speeds; 0: do not measure.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the figures as JSON.")
def main(
    bundle: Path, file: Path, per_kind: int, max_tokens: int, rounds: int, output: Path | None
) -> None:
    """Measure BUNDLE on prompts of several kinds."""
    kinds = read_kinds(file, per_kind)
    logging.disable_progress_bar()
    figures = _answer(bundle, kinds, max_tokens)
    Console().print(_table(figures))
    _write(figures, output)
    if rounds:
        _write(figures | {"speed": _speed(bundle, kinds, rounds, max_tokens)}, output)
    if figures["failed"]:
        raise CheckFailedError(f"{figures['failed']} greedy tokens are not transformers'")


def _write(figures: Mapping[str, Any], output: Path | None) -> None:
    if output is not None:
        output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def read_kinds(file: Path, per_kind: int) -> dict[str, list[str]]:
    """Read prompts by kind, in the order of the file.

    Raises:
        UserError: the file is no JSON list of prompts with kinds.
    """
    found: dict[str, list[str]] = {}
    try:
        for entry in json.loads(file.read_text(encoding="utf-8")):
            found.setdefault(entry["kind"], []).append(entry["prompt"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: expected a JSON list of {{prompt, kind}}: {error}") from error
    return {kind: prompts[:per_kind] for kind, prompts in found.items()}


def mean_length(answers: Sequence[Generation]) -> float | None:
    """Return the mean tokens emitted per target forward that verified drafts."""
    lengths = [length for answer in answers for length in answer.accepted_lengths]
    return fmean(lengths) if lengths else None


def margin_ratios(logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Return by how much each row prefers another token, over the row's root mean square.

    Args:
        logits: float [T, V]. tokens: chosen in each row.
    Returns:
        float [T]; 0 where the token is the preferred one.
    """
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    return (logits.amax(-1) - chosen) / logits.pow(2).mean(-1).sqrt()


def _answer(bundle: Path, kinds: Mapping[str, Sequence[str]], max_tokens: int) -> dict[str, Any]:
    """Answer all prompts, and compare the greedy answers with transformers."""
    with LLM(bundle) as llm:
        record = llm.bundle.record
        llm.use_policy(FixedPolicy(configured_tree(record.config.speculation)))

        def ask(*, speculation: bool, **options: Any) -> Answers:
            sampling = SamplingParams(max_tokens=max_tokens, **options)
            return {
                kind: llm.generate(list(prompts), sampling=sampling, speculation=speculation)
                for kind, prompts in kinds.items()
            }

        drafted, plain = (ask(speculation=on, temperature=0.0) for on in (True, False))
        sampled = ask(speculation=True, temperature=0.7, seed=0)
        device, dtype = llm.bundle.device, record.config.engine.dtype
        target = Path(record.sources["target"].path)
    limit = THRESHOLDS["tie_margin"].values[dtype]
    judge = _Judge(target, device, limit)
    rows = {}
    for kind, prompts in kinds.items():
        ties = [
            judge.compare(kind_prompt, answer)
            for answers in (drafted, plain)
            for kind_prompt, answer in zip(prompts, answers[kind], strict=True)
        ]
        rows[kind] = {
            "prompts": len(prompts),
            "tokens": sum(len(answer.token_ids) for answer in drafted[kind]),
            "greedy": mean_length(drafted[kind]),
            "temperature_0.7": mean_length(sampled[kind]),
            "equal_without_speculation": sum(
                a.token_ids == b.token_ids for a, b in zip(drafted[kind], plain[kind], strict=True)
            ),
            "ties": sum(found for found, _ in ties),
            "failed": sum(failed for _, failed in ties),
        }
    return {
        "bundle": str(bundle),
        "device": str(device),
        "dtype": dtype,
        "tie_margin": limit,
        "kinds": rows,
        "failed": sum(row["failed"] for row in rows.values()),
        "largest_margin": judge.largest,
    }


class _Judge:
    """Compares answers with transformers in float32."""

    def __init__(self, target: Path, device: torch.device | str, limit: float) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(target)
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        self.model = model.to(device).eval()
        self.limit, self.largest = limit, 0.0

    @torch.inference_mode()
    def compare(self, prompt: str, answer: Generation) -> tuple[int, int]:
        """Return the ties of an answer, and the tokens that transformers does not choose."""
        chat = [{"role": "user", "content": prompt}]
        ids = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        both = torch.tensor([[*ids, *answer.token_ids[:-1]]], device=self.model.device)
        logits = self.model(both).logits[0, len(ids) - 1 :]
        margins = margin_ratios(logits, answer.token_ids)
        self.largest = max(self.largest, float(margins.max()))
        failed = int((margins > self.limit).sum())
        return int((margins > 0).sum()) - failed, failed


def _speed(
    bundle: Path, kinds: Mapping[str, Sequence[str]], rounds: int, max_tokens: int
) -> list[dict[str, Any]]:
    """Measure tokens per second against transformers, one request at a time."""
    questions = [{"prompt": prompts[0]} for prompts in kinds.values()]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.json"
        file.write_text(json.dumps(questions), encoding="utf-8")
        report = against(
            bundle,
            PeerOptions("transformers"),
            prompts=file,
            batches=(1,),
            rounds=rounds,
            max_tokens=max_tokens,
            heard=lambda row: print(row.line("transformers")),
        )
    return [row.to_dict() for row in report.rows]


def _table(figures: Mapping[str, Any]) -> Table:
    table = Table("kind", "acceptance, greedy", "at 0.7", "equal without", "ties", "failed")
    for kind, row in figures["kinds"].items():
        lengths = [f"{row[key]:.2f}" if row[key] else "-" for key in ("greedy", "temperature_0.7")]
        equal = f"{row['equal_without_speculation']} of {row['prompts']}"
        table.add_row(kind, *lengths, equal, str(row["ties"]), str(row["failed"]))
    return table


if __name__ == "__main__":
    run_command(main)
