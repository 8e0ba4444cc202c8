"""The tiny pair's bundle with a tree, and what it is asked while faults are planted in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.drafts.block.files import Geometry
from tests.drafts.block.files import write as write_draft
from tests.parity.fault import MAX_TOKENS
from tests.parity.planting import MANIFEST, SPEC
from tests.parity.shared_reference import share_reference
from tests.quantised import add_kv_scales, save_quantised
from tests.tiny import DRAFT, QUESTIONS, TARGET, build_tiny, tiny_config
from trt_eagle3.config import BuildConfig
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.parity.checks import sampling as sampling_check
from trt_eagle3.parity.checks.registry import CHECKS
from trt_eagle3.parity.record import options
from trt_eagle3.parity.record.engine import RecordingEngine
from trt_eagle3.parity.record.options import HOT_SEEDS, option_sets
from trt_eagle3.parity.record.workload import Case, draw_image
from trt_eagle3.parity.reference.sources import read_sources, read_unquantised
from trt_eagle3.parity.report import plots
from trt_eagle3.parity.report.summary import Findings
from trt_eagle3.parity.run import Validation
from trt_eagle3.pipeline import build as make_bundle
from trt_eagle3.prompts.prompt_file import Question, read_questions

TREE = {"mode": "tree", "steps": 3, "topk": 3, "num_draft_tokens": 10}
LIMITS = {"max_seq_len": 128, "max_visual_tokens": 64}


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a report's page, where they are not what is looked at: they take most of its time."""
    monkeypatch.setattr(plots, "_svg", lambda _: "<svg></svg>")


@pytest.fixture(scope="session")
def tree_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose accepted paths leave the first branch now and then."""
    return build_tiny(tmp_path_factory.mktemp("parity"), speculation=TREE, limits=LIMITS)


def case(name: str = "two images") -> Case:
    """Two images of the tiny pair's world, and a question that is not: its draft is right now
    and then.
    """
    images = read_questions(QUESTIONS)[1].images
    return Case(
        name, "images", Question("What changed, and why is the sky so blue in the second?", images)
    )


OPTIONAL = ("files", "batch", "sampling", "options", "serve")
"""Stages that take long, or would see a planted weight before the check that it is planted for."""


_STAGES = {
    "files": "bundle.files",
    "batch": "batch.",
    "sampling": "sampling.",
    "options": "options.",
    "serve": "serve.",
}


def without(*stages: str) -> list[str]:
    """Names of the checks of some of ``OPTIONAL``."""
    return [name for name in CHECKS for stage in stages if name.startswith(_STAGES[stage])]


SOME_OPTIONS = (
    "grammar + penalties",
    "stop + seed",
    "min_tokens",
    "JSON Schema",
    "named tool",
    *HOT_SEEDS[:2],
)
"""Of the sets of options, so many that each option is in one."""
BEGUN_CALL, WHOLE_CALL = 24, 96
"""Tokens of an answer that calls a tool: what comes after the name takes longest."""


def ask_few_options(
    patch: pytest.MonkeyPatch,
    names: Collection[str] = SOME_OPTIONS,
    max_tokens: int = BEGUN_CALL,
) -> None:
    """Have validations ask with the sets of options ``names`` alone, for ``max_tokens`` at most:
    all of them take seconds.
    """

    def some(*given: Any) -> dict[str, SamplingParams]:
        return {
            name: replace(s, max_tokens=min(s.max_tokens, max_tokens))
            for name, s in option_sets(*given).items()
            if name in names
        }

    patch.setattr(options, "option_sets", some)


SETTINGS = ("temperature 0.7", "top_p 0.8", "min_p 0.1", "penalties", "bias")
"""Of sampling."""

QUANTISED: dict[str, dict[str, Any]] = {
    "fp8": {"backend": "torch"},
    "w4a16-asymmetric": {},
    "awq": {},
    "made": {"weights": "int8"},
    "fp8-kv": {"backend": "torch", "kv_dtype": "fp8"},
    "calibrated": {"weights": "int4"},
}
"""Quantised bundles, and their engine."""


@pytest.fixture(scope="session")
def quantised_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A bundle of ``QUANTISED`` by its name, built when it is first asked for."""

    @cache
    def build(name: str) -> Path:
        root = tmp_path_factory.mktemp(name)
        made = "weights" in QUANTISED[name]
        target = TARGET if made else _quantised_target(root / "target", name)
        sections = {"engine": QUANTISED[name], "speculation": TREE, "limits": LIMITS}
        calibration = QUESTIONS if name == "calibrated" else None
        return build_tiny(root, calibration=calibration, target=target, **sections)

    return build


def _quantised_target(folder: Path, name: str) -> Path:
    if name != "fp8-kv":
        return save_quantised(folder, name)
    return add_kv_scales(save_quantised(folder, "fp8-channel"))


GEOMETRY = Geometry(
    hidden=256, inner=64, head_dim=32, vocab=704, draft_vocab=704, target_layers=8, rank=704
)
_OWN = {"mask_token_id": 640, "target_layer_ids": [1, 3, 6]}


def _write_bigrams(folder: Path, answer: Sequence[int]) -> None:
    """A DSpark draft whose markov head has learnt which token follows which in ``answer``."""
    follows = 0.1 * torch.randn(704, 704, generator=torch.Generator().manual_seed(1))
    for token, after in pairwise(answer):
        follows[after, token] = 9.0
    names = [f"markov_head.markov_{w}.weight" for w in ("w1", "w2")]
    tables = dict(zip(names, (torch.eye(704), follows), strict=True))
    write_draft(folder, "deepspec", GEOMETRY, drop=tuple(names), add=tables, **_OWN)


def _add_mask_rows(folder: Path, _: Sequence[int]) -> None:
    """The tiny draft, as one of P-EAGLE."""
    shutil.copytree(DRAFT, folder)
    tensors = load_file(folder / "model.safetensors")
    hidden = torch.randn(1, 1, 3 * 256, generator=torch.Generator().manual_seed(2))
    (folder / "model.safetensors").unlink()  # it may be a link
    save_file({**tensors, "mask_hidden": hidden.bfloat16()}, folder / "model.safetensors")


OVERRIDES = {"p-eagle": {"parallel": {"mask_token_id": 640, "num_drafts": 4}}}
"""Overrides of a draft's fields in ``BLOCKS``."""
BLOCKS: dict[str, Callable[[Path, Sequence[int]], object]] = {
    "dflash2": lambda folder, _: write_draft(
        folder, "z-lab dflash2", replace(GEOMETRY, rank=16), nested=_OWN, sliding_window=8
    ),
    "dspark": _write_bigrams,
    "p-eagle": _add_mask_rows,
    "dspark rnn": lambda folder, _: write_draft(
        folder,
        "speculators dspark",
        replace(GEOMETRY, rank=16, draft_vocab=500),
        weights={"markov": "rnn", "confidence": "hidden", "tables": True},
        markov_head_type="rnn",
        confidence_head_with_markov=False,
        sample_from_anchor=False,
        mask_token_id=640,
        aux_hidden_state_layer_ids=[2, 4, 7],
    ),
}
"""Bundles whose draft drafts a chain in one forward, and how that draft is written, which may learn
the tokens of an answer.
"""


@pytest.fixture(scope="session")
def block_bundle(
    tree_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A bundle of ``BLOCKS`` by its name, built when it is first asked for."""

    @cache
    def answer() -> Sequence[int]:
        asked = case().question
        with LLM(tree_bundle) as engine:
            return engine.generate(asked.prompt, images=asked.images, max_tokens=40).token_ids

    @cache
    def build(name: str) -> Path:
        root = tmp_path_factory.mktemp(name)
        BLOCKS[name](root / "draft", answer())
        chain = {"mode": "chain", "steps": 3}
        config = tiny_config(draft=root / "draft", speculation=chain, limits=LIMITS).model_dump()
        config["draft"]["overrides"] = OVERRIDES.get(name, {})
        return make_bundle(BuildConfig.model_validate(config), output=root).path

    return build


def inspect(
    engine: RecordingEngine,
    patch: pytest.MonkeyPatch,
    looks: Sequence[str] = (),
    settings: Collection[str] = SETTINGS,
    *,
    asked: Collection[str] | None = SOME_OPTIONS,
    max_tokens: int = MAX_TOKENS,
    option_tokens: int = BEGUN_CALL,
    own_sources: bool = False,
    left_out: Sequence[str] = (),
) -> Findings:
    """Validate with one prompt, several where a stage wants them.

    ``looks``: those of ``OPTIONAL`` that run. ``settings``: those of ``SETTINGS`` that are sampled.
    ``asked``: the sets of options, for ``option_tokens`` each; None: all, for as many as they say.
    ``own_sources``: read those of the bundle, which are not the tiny pair. ``left_out``: checks
    that need not run.
    """
    cases = [case()]
    if "sampling" in looks:
        cases.append(case("once more"))
    if {"batch", "serve"} & set(looks):
        cases += [
            Case(f"picture {i}", "image", Question("What is this?", [draw_image(i)]))
            for i in (5, 6, 7)
        ]
    patch.setattr(sampling_check, "_DRAWS", 1000)
    patch.setattr(options, "NUM_CASES", 1)
    if asked is not None:
        ask_few_options(patch, asked, option_tokens)
    some = {name: sampling_check._SETTINGS[name] for name in SETTINGS if name in settings}
    patch.setattr(sampling_check, "_SETTINGS", some)
    left_out = [*left_out, *without(*(stage for stage in OPTIONAL if stage not in looks))]
    share_reference(patch)
    original, spec, manifest = None, SPEC, MANIFEST
    if own_sources:
        spec, found = read_sources(engine)
        assert found is not None
        manifest, original = found, read_unquantised(engine, spec)
    return Validation(engine, left_out=left_out).run(cases, max_tokens, spec, manifest, original)
