"""A draft whose own token table was never trained: the probe proposes the target's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.probe.conftest import STEPS, Asked
from tests.tiny import DRAFT, TARGET, build_tiny
from trt_eagle3.checkpoint.tensor_index import open_index
from trt_eagle3.cli import cli
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.engine.runtime.embedding import table_difference
from trt_eagle3.probe.interpretation import Interpretation, alternatives
from trt_eagle3.probe.result import ProbeReport, make_report
from trt_eagle3.probe.score import Scorer
from trt_eagle3.probe.search import search

EMBEDDING = Interpretation((("embedding", "target"),))


def untrained(table: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(table.shape, generator=generator).to(table) * table.float().std()


def with_table(folder: Path, change: Callable[[Tensor], Tensor]) -> Path:
    """The tiny draft with a table of its own: the target's, changed."""
    table = load_file(TARGET / "model.safetensors")["model.language_model.embed_tokens.weight"]
    tensors = load_file(DRAFT / "model.safetensors") | {"embed_tokens.weight": change(table)}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(DRAFT / "config.json", folder)
    return folder


def probed(tiny: Asked, draft: Path, folder: Path) -> ProbeReport:
    """The target is that of ``tiny``, and so are its answers."""
    bundle = LoadedBundle.open(build_tiny(folder, draft=draft, speculation={"steps": STEPS}))
    manifest = bundle.manifest
    assert manifest is not None
    assert manifest.embedding == "own"
    scorer = Scorer(bundle, tiny.recordings[:6], folder)
    found = search(scorer, manifest, bundle.spec)
    return make_report(
        found,
        manifest,
        bundle.spec,
        bundle="tiny",
        num_prompts=6,
        num_steps=STEPS,
        overrides={},
        floor=0.25,
        baseline=scorer.baseline,
    )


def test_probe_proposes_the_targets_table_for_an_untrained_one(tiny: Asked, tmp_path: Path) -> None:
    report = probed(tiny, with_table(tmp_path / "draft", untrained), tmp_path)
    assert report.best == EMBEDDING
    assert report.overrides == {"embedding": "target"}
    lengths = {r.interpretation: r.acceptance_length for r in report.interpretations}
    assert lengths[EMBEDDING] > 3.9
    assert lengths[Interpretation()] < 2.5


def test_probe_keeps_a_copy_of_the_targets_table(tiny: Asked, tmp_path: Path) -> None:
    report = probed(tiny, with_table(tmp_path / "draft", torch.clone), tmp_path)
    assert report.best == Interpretation()
    assert "embedding" in report.silent


def test_probe_tries_no_table_where_the_draft_has_none_of_its_own(tiny: Asked) -> None:
    assert tiny.manifest.embedding == "target"
    assert "embedding" not in alternatives(tiny.manifest, tiny.bundle.spec)


TABLES: dict[str, tuple[Callable[[Tensor], Tensor], float, float, bool]] = {
    "a copy": (torch.clone, 0.0, 1.0, False),
    "twice as large": (lambda table: 2 * table, 1.0, 1.0, False),
    "the other way": (lambda table: -table, 2.0, -1.0, True),
    "untrained": (untrained, 2**0.5, 0.0, True),
}


@pytest.mark.usefixtures("wide_console")
@pytest.mark.parametrize("name", TABLES)
def test_inspect_says_how_a_drafts_own_table_differs_from_the_targets(
    name: str, tmp_path: Path
) -> None:
    change, relative, cosine, unrelated = TABLES[name]
    draft = with_table(tmp_path / "draft", change)
    result = CliRunner().invoke(cli, ["inspect", str(TARGET), str(draft), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)["draft"]["embedding_difference"]
    assert found["relative"] == pytest.approx(relative, abs=0.05)
    assert found["cosine"] == pytest.approx(cosine, abs=0.02)
    assert found["num_rows"] == 704
    result = CliRunner().invoke(cli, ["inspect", str(TARGET), str(draft)])
    line = "its own embedding against the target's, 704 rows: relative difference "
    assert f"{line}{found['relative']:.3f}, mean cosine {found['cosine']:.3f}" in result.output
    assert ("draft.overrides.embedding: target" in result.output) is unrelated


def test_inspect_compares_no_tables_where_the_draft_takes_the_targets() -> None:
    result = CliRunner().invoke(cli, ["inspect", str(TARGET), str(DRAFT)])
    assert result.exit_code == 0, result.output
    assert "its own embedding" not in result.output


def test_table_difference_compares_evenly_spaced_rows_of_a_large_table(tmp_path: Path) -> None:
    table = torch.randn(10_000, 4)
    save_file({"a": table, "b": -table, "c": table[:5].clone()}, tmp_path / "model.safetensors")
    index = open_index(tmp_path)
    found = table_difference(index["b"], index["a"])
    assert found is not None
    assert (found.num_rows, found.is_unrelated) == (3334, True)
    assert (found.relative, found.cosine) == (pytest.approx(2), pytest.approx(-1))
    assert table_difference(index["c"], index["a"]) is None
