"""build: what a bundle holds, that it can move, and that bad checkpoints leave nothing behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import trt_eagle3
from tests.tiny import DRAFT, TARGET, build_tiny, tiny_config
from trt_eagle3.errors import UserError
from trt_eagle3.pipeline import STAGES, build

QUESTION = "What is 12 plus 30?"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def answer(bundle: Path) -> tuple[int, ...]:
    return trt_eagle3.load(bundle).generate(QUESTION).token_ids


def test_bundle_has_every_part(bundle: Path) -> None:
    for graph in ("target", "draft", "fuse", "vision"):
        assert (bundle / graph / "model.onnx").is_file()
        config = json.loads((bundle / graph / "config.json").read_text())
        assert set(config) == {"version", "pretrained_config", "build_config"}
    record = json.loads((bundle / "bundle.json").read_text())
    assert record["sources"]["target"]["files"]
    assert record["sources"]["draft"]["files"]
    assert (bundle / "processor" / "tokenizer.json").is_file()


def test_graphs_hold_no_weights(bundle: Path) -> None:
    weights = sum(f.stat().st_size for f in bundle.rglob("*.safetensors"))
    graphs = sum(f.stat().st_size for f in bundle.rglob("*.onnx"))
    assert graphs < weights / 20


def test_moved_bundle_answers_the_same_without_its_sources(
    bundle: Path, answer: tuple[int, ...], tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(bundle, moved)
    assert trt_eagle3.load(moved).generate(QUESTION).token_ids == answer


def test_reference_bundle_leaves_the_weights_where_they_are(answer: tuple[int, ...], tmp_path: Path) -> None:
    path = build(tiny_config(), output=tmp_path, reference_weights=True).path
    assert not list(path.rglob("*.safetensors"))
    assert trt_eagle3.load(path).generate(QUESTION).token_ids == answer


def test_linked_checkpoint_makes_a_self_contained_bundle(answer: tuple[int, ...], tmp_path: Path) -> None:
    """A Hub cache holds links to blobs; neither ONNX Runtime nor a copied bundle can follow them."""
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for file in TARGET.iterdir():
        (linked / file.name).symlink_to(file)
    path = build_tiny(tmp_path, target=linked)
    assert not any(f.is_symlink() for f in path.rglob("*"))
    assert trt_eagle3.load(path).generate(QUESTION).token_ids == answer


def test_target_without_draft_decodes_plainly(answer: tuple[int, ...], tmp_path: Path) -> None:
    generation = trt_eagle3.load(build_tiny(tmp_path, draft=None)).generate(QUESTION)
    assert generation.token_ids == answer
    assert set(generation.accepted_lengths) == {1}


def test_progress_names_every_stage_in_order(tmp_path: Path) -> None:
    seen: list[str] = []
    report = build(tiny_config(), output=tmp_path, progress=seen.append)
    assert seen == [stage for stage in STAGES if stage != "engines"] == list(report.seconds)


def test_second_build_replaces_the_first(tmp_path: Path) -> None:
    first = build_tiny(tmp_path)
    (first / "marker").touch()
    assert build_tiny(tmp_path) == first
    assert not (first / "marker").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["tiny"]


def _edit_config(folder: Path, change: Callable[[dict[str, object]], object]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def _edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    file.unlink()
    save_file(tensors, file)


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data[: len(data) // 2])


def _add(tensors: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> None:
    tensors[name] = value


def _garble_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


BAD_TARGETS = {
    "not a checkpoint": (lambda f: (f / "config.json").unlink(), "not a checkpoint"),
    "truncated weights": (_truncate, "not a sound safetensors file"),
    "another architecture": (
        lambda f: _edit_config(f, lambda c: c.update(model_type="llama")),
        "expected a dense Qwen",
    ),
    "too many layers promised": (
        lambda f: _edit_config(f, lambda c: c["text_config"].update(num_hidden_layers=9)),
        "layers.8.*missing",
    ),
    "a tensor missing": (
        lambda f: _edit_tensors(f, lambda t: t.pop("model.visual.merger.norm.bias")),
        "merger.norm.bias",
    ),
    "a garbled tokenizer": (_garble_tokenizer, "target: broken tokenizer"),
    "a surplus tensor": (
        lambda f: _edit_tensors(f, lambda t: _add(t, "model.language_model.extra", torch.ones(1))),
        "extra surplus",
    ),
    "a misshapen tensor": (
        lambda f: _edit_tensors(f, lambda t: _add(t, "model.language_model.norm.weight", torch.ones(3))),
        r"norm.weight: expected shape \[256\].*got \[3\]",
    ),
}
BAD_DRAFTS = {
    "aux layer out of range": (
        lambda f: _edit_config(f, lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[1, 3, 40])),
        "40",
    ),
    "another vocabulary": (lambda f: _edit_config(f, lambda c: c.update(vocab_size=9)), "vocabulary"),
    "d2t out of range": (lambda f: _edit_tensors(f, lambda t: t["d2t"].__setitem__(-1, 10**6)), "out of range"),
    "another hidden size": (
        lambda f: _edit_tensors(f, lambda t: _add(t, "fc.weight", torch.ones(256, 384))),
        "hidden size 128",
    ),
    "no fc": (lambda f: _edit_tensors(f, lambda t: t.pop("fc.weight")), "fc.weight"),
}


@pytest.mark.parametrize(("side", "case"), [("target", c) for c in BAD_TARGETS] + [("draft", c) for c in BAD_DRAFTS])
def test_bad_checkpoint_is_one_line_and_leaves_nothing(side: str, case: str, tmp_path: Path) -> None:
    spoil, message = (BAD_TARGETS if side == "target" else BAD_DRAFTS)[case]
    spoiled = Path(shutil.copytree(TARGET if side == "target" else DRAFT, tmp_path / side))
    spoil(spoiled)
    output = tmp_path / "engines"
    with pytest.raises(UserError, match=message) as caught:
        build_tiny(output, **{side: spoiled})
    assert "\n" not in str(caught.value)
    assert not output.exists() or not list(output.iterdir())


def test_longer_sequences_than_the_target_was_made_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"max_seq_len: 4097, the target was made for 4096 positions.*config\.json"):
        build_tiny(tmp_path, limits={"max_seq_len": 4097})
    assert list(tmp_path.iterdir()) == []


def test_name_of_an_unfinished_build_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\.partial- marks unfinished builds"):
        trt_eagle3.build(tiny_config().model_copy(update={"name": "tiny.partial-7"}), output=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_place_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be UTF-8"):
        build_tiny(tmp_path / "engines\udcff")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", ["tree", "dynamic"])
def test_tree_wider_than_the_drafts_vocabulary_is_refused(tmp_path: Path, mode: str) -> None:
    speculation = {"mode": mode, "steps": 1, "topk": 121}
    with pytest.raises(UserError, match="121 best children, the draft knows 120 tokens"):
        build_tiny(tmp_path, speculation=speculation)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tiny", "tiny/notes.txt"], ids=["file", "folder"])
def test_what_is_no_bundle_is_never_replaced(tmp_path: Path, name: str) -> None:
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(UserError, match="expected a bundle or nothing there"):
        build_tiny(tmp_path)
    assert mine.read_text() == "mine"
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny"]


def test_damaged_bundle_is_replaced(tmp_path: Path) -> None:
    (build_tiny(tmp_path) / "bundle.json").unlink()
    assert trt_eagle3.load(build_tiny(tmp_path)).drafting


@pytest.mark.parametrize("part", ["target", "draft"])
def test_damaged_record_is_refused_in_one_line(tmp_path: Path, part: str) -> None:
    file = build_tiny(tmp_path) / "bundle.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {part: {}}))
    with pytest.raises(UserError, match=r"a damaged target or draft .*Rebuild") as caught:
        trt_eagle3.load(file.parent)
    assert "\n" not in str(caught.value)


def test_more_sequences_than_max_batch_size_wait_their_turn(tmp_path: Path) -> None:
    limits = {"max_seq_len": 64, "max_batch_size": 2}
    engine = trt_eagle3.load(build_tiny(tmp_path, limits=limits))
    alone = engine.generate(QUESTION).token_ids
    streams = [engine.stream(QUESTION) for _ in range(3)]
    assert all(tuple(t for chunk in stream for t in chunk.token_ids) == alone for stream in streams)
