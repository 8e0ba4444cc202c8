"""Probe a bundle or a pair: from prompts to a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trt_eagle3.config import BuildConfig, DraftConfig, TargetConfig
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.errors import UserError
from trt_eagle3.pipeline import build
from trt_eagle3.probe import MAX_TOKENS
from trt_eagle3.probe.interpretation import candidate_layers
from trt_eagle3.probe.record import record
from trt_eagle3.probe.result import ProbeReport, make_report
from trt_eagle3.probe.score import Scorer, draft_ids
from trt_eagle3.probe.search import search
from trt_eagle3.prompts.kept import PromptsOrigin, origin_of, questions_for
from trt_eagle3.prompts.prompt_file import Question

__all__ = ["Progress", "probe"]

Progress = Callable[[str, int, int], object]
"""Called with a stage (``prompts`` or ``interpretations``), the number of finished parts, and the
total as far as it is known.
"""


def probe(
    path: str,
    draft: str | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    prompts: Path | None = None,
    max_tokens: int = MAX_TOKENS,
    progress: Progress = lambda *_: None,
) -> ProbeReport:
    """Measure which interpretation of a draft fits its target.

    Args:
        path: a bundle, or with ``draft`` a target checkpoint.
        draft: a draft checkpoint; the pair is then built in a temporary folder, with its weights
            left in place.
        overrides: ``draft.overrides`` of a pair.
        prompts: a file (``prompts/prompt_file.py``) to use in place of the bundled prompts.
        max_tokens: most tokens of each answer.
    Raises:
        UserError: the bundle has no draft, or bundle, pair or prompts are invalid.
    """
    if max_tokens < 2:
        raise UserError(f"max_tokens: expected at least 2, got {max_tokens}")
    if overrides and draft is None:
        raise UserError(
            f"{path}: overrides are for a pair; a bundle has its draft's manifest. Rebuild the "
            "bundle with them."
        )
    with TemporaryDirectory(prefix="trt-eagle3-probe-") as temporary:
        folder = Path(temporary)
        opened = LoadedBundle.open(
            path if draft is None else _build(path, draft, overrides or {}, folder)
        )
        bundle = replace(opened, run_ahead=False)  # the intermediates of every forward are read
        vision = bundle.spec.vision is not None
        questions = questions_for(bundle.path, prompts, vision=vision)
        name = path if draft is None else f"{path} with {draft}"
        origin = origin_of(bundle.path, prompts)
        return _probe(bundle, questions, origin, folder, name, max_tokens, progress)


def _probe(
    bundle: LoadedBundle,
    questions: Sequence[Question],
    origin: PromptsOrigin,
    folder: Path,
    name: str,
    max_tokens: int,
    progress: Progress,
) -> ProbeReport:
    manifest, spec = bundle.manifest, bundle.spec
    if manifest is None:
        raise UserError(f"{bundle.path}: a bundle without a draft: there is nothing to probe")
    layers, done = candidate_layers(manifest, spec), iter(range(1, len(questions) + 1))
    progress("prompts", 0, len(questions))
    recordings = record(
        bundle,
        questions,
        layers,
        draft_ids(manifest),
        max_tokens=max_tokens,
        progress=lambda: progress("prompts", next(done), len(questions)),
    )
    scorer = Scorer(bundle, recordings, folder)
    found = search(
        scorer, manifest, spec, lambda scored, total: progress("interpretations", scored, total)
    )
    config = bundle.record.config
    return make_report(
        found,
        manifest,
        spec,
        bundle=name,
        baseline=scorer.baseline,
        prompts=origin,
        num_prompts=len(recordings),
        num_steps=scorer.num_steps,
        overrides=dict(config.draft.overrides) if config.draft else {},
        floor=config.speculation.acceptance_floor,
    )


def _build(target: str, draft: str, overrides: Mapping[str, Any], folder: Path) -> Path:
    config = BuildConfig(
        name="pair",
        target=TargetConfig(checkpoint=target),
        draft=DraftConfig(checkpoint=draft, overrides=overrides),
        output=folder,
    )
    return build(config, reference_weights=True).path
