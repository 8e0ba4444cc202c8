"""build: what a bundle holds, that it can move, and that bad checkpoints leave nothing behind."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import trt_eagle3
from tests.atomic_io.points import CRASHED, in_child, start, watch
from tests.tiny import DRAFT, TARGET, build_tiny, tiny_config
from trt_eagle3.atomic_io import create_file, directory
from trt_eagle3.commands.report import inspection, inspection_lines
from trt_eagle3.decode.policy.tuning import TUNING_FILE
from trt_eagle3.engine.bundle.read import read_bundle
from trt_eagle3.engine.trt.folder import ENGINE_FILE
from trt_eagle3.errors import UserError
from trt_eagle3.families.qwen3_vl import FAMILY
from trt_eagle3.families.registry import read_target
from trt_eagle3.multimodal import Processor
from trt_eagle3.pipeline import STAGES, build

QUESTION = "What is 12 plus 30?"

END_OF_TEXT, IM_END = 632, 634


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


def test_reference_bundle_leaves_the_weights_where_they_are(
    answer: tuple[int, ...], tmp_path: Path
) -> None:
    path = build(tiny_config(), output=tmp_path, reference_weights=True).path
    assert not list(path.rglob("*.safetensors"))
    assert trt_eagle3.load(path).generate(QUESTION).token_ids == answer


def test_linked_checkpoint_makes_a_self_contained_bundle(
    answer: tuple[int, ...], tmp_path: Path
) -> None:
    """A Hub cache holds links to blobs; neither ONNX Runtime nor a copied bundle can follow
    them.
    """
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
    assert (generation.accepted_lengths, generation.acceptance_length) == ((), None)


@pytest.mark.parametrize("named", ["tokenizer_config.json", "special_tokens_map.json"])
def test_tokenizers_eos_token_ends_answers_and_is_warned_of_where_no_config_names_it(
    named: str, answer: tuple[int, ...], tmp_path: Path
) -> None:
    target = tmp_path / "target"
    shutil.copytree(TARGET, target)
    (target / "generation_config.json").unlink()
    _edit_config(target, lambda config: config.update(eos_token_id=[END_OF_TEXT]))
    tokens = json.loads((target / "tokenizer_config.json").read_text())
    eos = {"eos_token": {"content": tokens.pop("eos_token")}}
    (target / "tokenizer_config.json").write_text(json.dumps(tokens))
    (target / named).write_text(json.dumps((tokens | eos) if named.startswith("tok") else eos))

    report = build(tiny_config(target=target, draft=None), output=tmp_path)
    [warning] = [line for line in report.warnings if line.startswith("end tokens: ")]
    assert f"the configs name <|endoftext|> ({END_OF_TEXT}); the tokenizer's eos_token" in warning
    assert f"Add {IM_END} to eos_token_id in generation_config.json." in warning
    spec = read_target(target)
    assert inspection(spec, None)["target"]["warnings"] == [warning]
    assert f"warning: {warning}" in inspection_lines(spec, None)

    with trt_eagle3.load(report.path) as llm:
        found = llm.generate(QUESTION)
        assert (found.token_ids, found.finish_reason) == (answer, "stop")
        assert answer[-1] == IM_END
        longer = llm.generate(QUESTION, ignore_eos=True, max_tokens=len(answer) + 4)
        assert (longer.token_ids[: len(answer)], longer.finish_reason) == (answer, "length")


def test_end_tokens_that_configs_name_are_not_warned_of() -> None:
    spec = read_target(TARGET)
    assert spec.eos_token_ids == (IM_END, END_OF_TEXT)
    assert inspection(spec, None)["target"]["warnings"] == []


def test_progress_names_every_stage_in_order(tmp_path: Path) -> None:
    seen: list[str] = []
    report = build(tiny_config(), output=tmp_path, progress=seen.append)
    others = {"calibration", "engines", "quantisation"}
    assert seen == [s for s in STAGES if s not in others] == list(report.seconds)


def test_second_build_replaces_the_first(tmp_path: Path) -> None:
    first = build_tiny(tmp_path)
    built = read_bundle(first)
    assert build_tiny(tmp_path) == first
    assert read_bundle(first).created_at > built.created_at
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
    "truncated weights": (_truncate, "not a valid safetensors file"),
    "another architecture": (
        lambda f: _edit_config(f, lambda c: c.update(model_type="mistral")),
        "model_type .mistral., architecture .*: not supported",
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
        lambda f: _edit_tensors(
            f, lambda t: _add(t, "model.language_model.norm.weight", torch.ones(3))
        ),
        r"norm.weight: expected shape \[256\].*got \[3\]",
    ),
}
BAD_DRAFTS = {
    "aux layer out of range": (
        lambda f: _edit_config(
            f, lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[1, 3, 40])
        ),
        "40",
    ),
    "another vocabulary": (
        lambda f: _edit_config(f, lambda c: c.update(vocab_size=9)),
        "vocabulary",
    ),
    "d2t out of range": (
        lambda f: _edit_tensors(f, lambda t: t["d2t"].__setitem__(-1, 10**6)),
        "out of range",
    ),
    "another hidden size": (
        lambda f: _edit_tensors(f, lambda t: _add(t, "fc.weight", torch.ones(256, 384))),
        "hidden size 128",
    ),
    "no fc": (lambda f: _edit_tensors(f, lambda t: t.pop("fc.weight")), "fc.weight"),
}


@pytest.mark.parametrize(
    ("side", "case"), [("target", c) for c in BAD_TARGETS] + [("draft", c) for c in BAD_DRAFTS]
)
def test_bad_checkpoint_is_one_line_and_leaves_nothing(
    side: str, case: str, tmp_path: Path
) -> None:
    spoil, message = (BAD_TARGETS if side == "target" else BAD_DRAFTS)[case]
    spoiled = Path(shutil.copytree(TARGET if side == "target" else DRAFT, tmp_path / side))
    spoil(spoiled)
    output = tmp_path / "engines"
    with pytest.raises(UserError, match=message) as caught:
        build_tiny(output, **{side: spoiled})
    assert "\n" not in str(caught.value)
    assert not output.exists() or not list(output.iterdir())


def reheaded(
    file: Path, change: Callable[[dict[str, Any]], object], encoding: str = "utf-8"
) -> None:
    """Write another header before the same bytes."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header)
    text = json.dumps(header).encode(encoding)
    file.unlink()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


DAMAGED_HEADERS: dict[str, Callable[[Path], object]] = {
    "metadata that is no text": lambda f: reheaded(
        f, lambda h: h.update(__metadata__={"epoch": 1})
    ),
    "metadata that is a list": lambda f: reheaded(f, lambda h: h.update(__metadata__=["pt"])),
    "UTF-16": lambda f: reheaded(f, lambda _: None, "utf-16"),
    "an unknown type": lambda f: reheaded(f, lambda h: h["d2t"].update(dtype="X64")),
    "another type": lambda f: reheaded(f, lambda h: h["d2t"].update(dtype="F64")),
    "an offset past the end": lambda f: reheaded(
        f, lambda h: h["d2t"].update(data_offsets=[1 << 40, 2 << 40])
    ),
    "a gap": lambda f: reheaded(f, lambda h: h.pop("norm.weight")),
    "a shape": lambda f: reheaded(f, lambda h: h["d2t"].update(shape=[1 << 62, 1 << 62])),
    "a length": lambda f: f.write_bytes((1 << 62).to_bytes(8, "little") + f.read_bytes()[8:]),
}


@pytest.mark.parametrize("case", DAMAGED_HEADERS)
def test_draft_whose_header_is_damaged_fails_at_build(tmp_path: Path, case: str) -> None:
    """Not in ``generate``, where another reader of the same header refused it with a traceback."""
    draft = Path(shutil.copytree(DRAFT, tmp_path / "draft"))
    DAMAGED_HEADERS[case](draft / "model.safetensors")
    with pytest.raises(UserError) as caught:
        build_tiny(tmp_path / "engines", draft=draft)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "engines").exists()


def test_longer_sequences_than_the_target_was_made_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"max_seq_len: 4097, the target has 4096 positions.*config\.json"
    ):
        build_tiny(tmp_path, limits={"max_seq_len": 4097})
    assert list(tmp_path.iterdir()) == []


def test_name_of_an_unfinished_build_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\.partial- marks unfinished builds"):
        trt_eagle3.build(
            tiny_config().model_copy(update={"name": "tiny.partial-7"}), output=tmp_path
        )
    assert list(tmp_path.iterdir()) == []


def test_place_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be UTF-8"):
        build_tiny(tmp_path / "engines\udcff")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", ["tree", "dynamic"])
def test_tree_wider_than_the_drafts_vocabulary_is_refused(tmp_path: Path, mode: str) -> None:
    speculation = {"mode": mode, "steps": 1, "topk": 121}
    with pytest.raises(UserError, match="121 best children, the draft's vocabulary has 120 tokens"):
        build_tiny(tmp_path, speculation=speculation)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tiny", "tiny/notes.txt"], ids=["file", "folder"])
def test_what_is_no_bundle_is_never_replaced(tmp_path: Path, name: str) -> None:
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(UserError, match="expected a bundle of trt-eagle3 or nothing there"):
        build_tiny(tmp_path)
    assert mine.read_text() == "mine"
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny"]


@pytest.mark.parametrize("name", ["bundle.json", "target/config.json", "target/model.onnx"])
def test_folder_that_looks_like_a_bundle_is_never_replaced(tmp_path: Path, name: str) -> None:
    mine = {tmp_path / "tiny" / file: "{}" for file in (name, "train.yaml", "images/1.png")}
    for file, text in mine.items():
        create_file(file, text.encode())
    with pytest.raises(
        UserError, match=r"expected a bundle of trt-eagle3 or nothing there.*Move it away"
    ):
        build_tiny(tmp_path)
    assert {file: file.read_text() for file in mine} == mine


@pytest.mark.parametrize("text", [None, "{", '{"schema_version": 2, "name": "mine"}'])
def test_bundle_whose_record_is_no_longer_ours_is_not_replaced(
    tmp_path: Path, text: str | None
) -> None:
    file = build_tiny(tmp_path) / "bundle.json"
    file.unlink()
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=r"bundle\.json.*Move it away"):
        build_tiny(tmp_path)


def test_bundle_of_another_schema_version_or_with_damaged_weights_is_replaced(
    tmp_path: Path,
) -> None:
    file = build_tiny(tmp_path) / "bundle.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema_version": 0}))
    build_tiny(tmp_path)
    (file.parent / "weights/target/model.safetensors").unlink()
    assert trt_eagle3.load(build_tiny(tmp_path)).bundle.drafter


def test_what_commands_write_into_a_bundle_does_not_keep_build_from_replacing_it(
    tmp_path: Path,
) -> None:
    path = build_tiny(tmp_path)
    later = [f"parity/{stem}.{end}" for stem in ("report", "compare") for end in ("json", "html")]
    later += [TUNING_FILE, f"target/{ENGINE_FILE}", f"vision/{ENGINE_FILE}.partial", "timing.cache"]
    for name in later:
        create_file(path / name, b"")
    build_tiny(tmp_path)
    assert not any((path / name).exists() for name in later)


def copied_checkpoint(folder: Path) -> tuple[Path, dict[str, bytes]]:
    shutil.copytree(TARGET, folder)
    return folder, contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("place", ["target", "target/engines", ".", "link"])
@pytest.mark.parametrize("reference", [True, False])
def test_output_over_a_checkpoint_or_in_it_is_refused(
    tmp_path: Path, place: str, reference: bool
) -> None:
    target, before = copied_checkpoint(tmp_path / "checkpoints/target")
    (tmp_path / "checkpoints/link").symlink_to(target)
    path = tmp_path / "checkpoints" / place
    config = tiny_config(target=target).model_copy(
        update={"name": path.resolve().name if place == "." else path.name}
    )
    with pytest.raises(UserError, match=f"(is|contains|lies in) the checkpoint {target}") as error:
        build(config, output=path.parent, reference_weights=reference)
    assert "\n" not in str(error.value)
    assert contents(target) == before


def test_output_around_the_blobs_of_a_linked_checkpoint_is_refused(tmp_path: Path) -> None:
    linked, blobs = tmp_path / "snapshot", tmp_path / "tiny"
    linked.mkdir()
    blobs.mkdir()
    for number, file in enumerate(sorted(TARGET.iterdir())):
        shutil.copy(file, blobs / str(number))
        (linked / file.name).symlink_to(blobs / str(number))
    with pytest.raises(UserError, match="contains the weight file"):
        build_tiny(tmp_path, target=linked)


def test_output_over_the_configs_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "work" / "tiny" / "config.yaml"
    file.parent.mkdir(parents=True)
    config = tiny_config()
    for name, output in (("tiny", tmp_path / "work"), ("work", tmp_path)):
        with pytest.raises(UserError, match=f"the config's folder {file.parent}"):
            build(config.model_copy(update={"name": name}), output=output, config_file=file)
    assert build(config, output=file.parent / "engines", config_file=file).path.is_dir()


def test_bundle_that_is_a_link_stays_one(tmp_path: Path) -> None:
    real = build_tiny(tmp_path / "disk").rename(tmp_path / "disk/v1")
    (tmp_path / "tiny").symlink_to(real)
    before = read_bundle(real)
    assert build_tiny(tmp_path) == tmp_path / "tiny"
    assert (tmp_path / "tiny").is_symlink()
    assert read_bundle(real) != before
    assert [path.name for path in real.parent.iterdir()] == ["v1"]


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


def test_every_file_and_folder_of_a_bundle_is_synced_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hard-linked weights, the processor's copies and sub-folders too."""
    synced, before_exchange = set(), []
    fsync, exchange = os.fsync, directory.exchange

    def recorded(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        fsync(fd)

    def exchanged(new: Path, path: Path) -> None:
        before_exchange.append(set(synced))
        exchange(new, path)

    build_tiny(tmp_path)
    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(directory, "exchange", exchanged)
    path = build_tiny(tmp_path)
    (done,) = before_exchange
    assert {entry.stat().st_ino for entry in (path, *path.rglob("*"))} <= done


# Killed builds, full disks, and builds at the same time


def build_until(output: Path, at: int) -> None:
    count = watch(output, at, "crash")
    build_tiny(output)
    (output.parent / "count").write_text(str(count()))


def test_build_killed_at_any_file_operation_leaves_a_bundle_that_loads(tmp_path: Path) -> None:
    """At some of them; ``test_directory.py`` has every operation of a smaller folder."""
    output = tmp_path / "engines"
    path = build_tiny(output)
    assert in_child(build_until, output, 0) == 0
    count = int((tmp_path / "count").read_text())
    assert count > 70
    for at in (*range(5, count - 20, count // 6), count - 4):  # old files are removed at the end
        before = read_bundle(path)
        assert in_child(build_until, output, at) == CRASHED
        assert trt_eagle3.load(path).bundle.record.created_at >= before.created_at
        for left in {entry for entry in output.iterdir() if entry.is_dir()} - {path}:
            with pytest.raises(UserError, match="an unfinished build"):
                trt_eagle3.load(left)
        build_tiny(output)
        assert [entry.name for entry in output.iterdir()] == ["tiny"]


def build_on_a_small_disk(output: Path, sizes: list[int]) -> None:
    """A limit on the size of files is what a process without privileges can have in place of a
    full disk.
    """
    import resource

    for size in sizes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        with pytest.raises(
            UserError, match=r"cannot write the bundle: File too large\. Nothing was left behind"
        ):
            build_tiny(output)
        assert [entry.name for entry in output.iterdir()] == ["tiny"]


def test_build_that_finds_no_room_leaves_the_old_bundle_and_nothing_else(tmp_path: Path) -> None:
    path = build_tiny(tmp_path)
    before = read_bundle(path)
    largest = max(f.stat().st_size for f in path.rglob("*.onnx"))  # weights are links
    assert in_child(build_on_a_small_disk, tmp_path, [10, 1000, largest // 2, largest - 1]) == 0
    assert trt_eagle3.load(path).bundle.record == before


def build_often(output: Path, target: Path, draft: Path, count: int) -> None:
    """As in a container of its own: all have the same process id."""
    os.getpid = lambda: 7
    while count:
        try:
            build_tiny(output, target=target, draft=draft)
            count -= 1
        except UserError as error:
            if "another build or deployment is writing it" not in str(error):
                raise
            time.sleep(0.01)


def digests(*folders: Path) -> dict[str, str]:
    return {
        str(f): hashlib.sha256(f.read_bytes()).hexdigest()
        for folder in folders
        for f in sorted(folder.iterdir())
    }


def test_builds_of_one_output_at_the_same_time_keep_the_checkpoint_whole_and_the_bundle_loadable(
    tmp_path: Path, answer: tuple[int, ...]
) -> None:
    """In two containers on one volume both exited 0 and the checkpoint had 0 bytes."""
    target, draft = (Path(shutil.copytree(f, tmp_path / f.name)) for f in (TARGET, DRAFT))
    sources, output = digests(target, draft), tmp_path / "engines"
    path = build_tiny(output, target=target, draft=draft)
    builders = [start(build_often, output, target, draft, 6) for _ in range(3)]
    loads = 0
    while any(builder.is_alive() for builder in builders):
        engine = trt_eagle3.load(path)
        loads += 1
        assert digests(target, draft) == sources
    assert [builder.exitcode for builder in builders] == [0, 0, 0]
    assert loads > 5
    assert engine.bundle.record.config.name == "tiny"
    assert trt_eagle3.load(path).generate(QUESTION).token_ids == answer
    assert [entry.name for entry in output.iterdir()] == ["tiny"]


def test_engine_whose_bundle_was_replaced_opens_no_graph_of_the_other(tmp_path: Path) -> None:
    engine = trt_eagle3.load(build_tiny(tmp_path))
    build_tiny(tmp_path, draft=None)
    with pytest.raises(
        UserError, match=r"was replaced or removed after it was opened\. Load it again"
    ) as error:
        engine.bundle.open_graph("draft")  # of which there is none now
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="was replaced or removed"):
        _ = engine.bundle.embedding


def test_load_of_a_bundle_that_is_replaced_meanwhile_reads_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = build_tiny(tmp_path), build_tiny(tmp_path / "other", draft=None)
    real = FAMILY.processor

    def replace_once(*args: Any, **options: Any) -> Processor:
        if other.exists():
            path.rename(tmp_path / "old")
            other.rename(path)
        return real(*args, **options)

    monkeypatch.setattr(FAMILY, "processor", replace_once)
    assert trt_eagle3.load(path).bundle.manifest is None
