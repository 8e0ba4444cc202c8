"""A bundle that somebody else made: whatever it claims, a load reads only its own files, or
refuses in one line.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

import trt_eagle3
from tests.tiny import build_tiny, tiny_config
from trt_eagle3.engine.bundle.read import read_bundle
from trt_eagle3.engine.bundle.record import BUNDLE_FILE
from trt_eagle3.errors import UserError
from trt_eagle3.graph.weights import (
    DESCRIBED,
    METADATA_KEY,
    WeightExpr,
    descriptions,
    weight_expr,
    weight_initializer,
)
from trt_eagle3.pipeline import build

TARGET_FILE = "weights/target/model.safetensors"
DRAFT_FILE = "weights/draft/model.safetensors"
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("engines"))


@pytest.fixture
def bundle(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "tiny", copy_function=link_weights))


def link_weights(source: str, destination: str) -> None:
    """Weights are large, and no test here writes into them."""
    (os.link if source.endswith(".safetensors") else shutil.copy)(source, destination)


def edit(bundle: Path, change: Change) -> None:
    file = bundle / BUNDLE_FILE
    record = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps(record))


def refusal(bundle: Path) -> str:
    start = time.monotonic()
    with pytest.raises(UserError) as error:
        trt_eagle3.load(bundle)
    assert time.monotonic() - start < 5
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 900  # two paths of pytest, and 200 characters of a stranger's
    return message


def replace_by_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def replace_by_link(file: Path, place: str | Path) -> None:
    file.unlink()
    file.symlink_to(place)


LOCATIONS = [
    "../elsewhere/model.safetensors",
    "/etc/passwd",
    "/dev/zero",
    "dev/zero",
    "weights/../weights/target/model.safetensors",
    "weights//target/model.safetensors",
    f"./{TARGET_FILE}",
    BUNDLE_FILE,
    "weights",
    "",
    ".",
    "a\0b",
    "x" * 100_000,
    "fifo",
]


@pytest.mark.parametrize("location", LOCATIONS, ids=lambda text: text[:20])
@pytest.mark.parametrize("part", ["embedding", "draft tensor", "source", "source and embedding"])
def test_location_that_is_no_recorded_weight_file_is_refused(
    bundle: Path, part: str, location: str
) -> None:
    os.mkfifo(bundle / "fifo")

    def change(record: dict[str, Any]) -> None:
        files = record["sources"]["target"]["files"]
        if "embedding" in part:
            record["embedding"]["location"] = location
        if part == "draft tensor":
            record["draft_tensors"]["d2t"]["location"] = location
        if "source" in part:
            files[location] = files.pop(TARGET_FILE)

    edit(bundle, change)
    refusal(bundle)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_emptied_list_of_files_does_not_switch_the_check_off(bundle: Path, role: str) -> None:
    edit(bundle, lambda r: r["sources"][role].update(files={}))
    assert "is not among the sources" in refusal(bundle)


def test_source_that_is_gone_does_not_switch_the_check_off(bundle: Path) -> None:
    edit(bundle, lambda r: r.update(sources={}))
    assert "is not among the sources" in refusal(bundle)


TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "negative offset": ({"offset": -1}, "offset: expected"),
    "offset in the header": ({"offset": 0}, "offset: expected"),
    "offset past the end": ({"offset": 1 << 40}, "offset: expected"),
    "offset past 64 bits": ({"offset": 1 << 80}, "offset: expected"),
    "length past the end": ({"num_bytes": 1 << 40}, "num_bytes: expected"),
    "negative length": ({"num_bytes": -1}, "num_bytes: expected"),
    "empty": ({"num_bytes": 0}, "num_bytes: expected"),
    "another type": ({"dtype": "F16"}, "dtype: expected"),
    "no type": ({"dtype": "x" * 100_000}, "dtype: expected"),
    "another shape": ({"shape": [256, 704]}, "shape: expected"),
    "negative shape": ({"shape": [-704, -256]}, "shape: expected"),
    "huge shape": ({"shape": [1 << 40, 1 << 40]}, "shape: expected"),
    "many dimensions": ({"shape": [1] * 100_000}, "shape: expected"),
    "another name": ({"name": "model.language_model.norm.weight"}, "offset: expected"),
    "no name": ({"name": "y" * 100_000}, "holds no tensor"),
    "not a number": ({"offset": float("nan")}, "offset: "),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensor_that_is_not_where_its_files_header_says_is_refused(bundle: Path, case: str) -> None:
    changes, message = TENSORS[case]
    edit(bundle, lambda r: r["embedding"].update(changes))
    assert message in refusal(bundle)


def test_draft_tensor_that_is_not_where_its_files_header_says_is_refused(bundle: Path) -> None:
    edit(bundle, lambda r: r["draft_tensors"]["d2t"].update(offset=8))
    assert "d2t: offset: expected" in refusal(bundle)


OTHER_TENSORS: dict[str, Change] = {
    "embedding of another shape": lambda r: r.update(
        embedding=r["draft_tensors"]["lm_head.weight"]
    ),
    "ids that are no whole numbers": lambda r: r["draft_tensors"].update(
        d2t=r["draft_tensors"]["norm.weight"]
    ),
    "target of another vocabulary": lambda r: r["target"].update(vocab_size=703),
}


@pytest.mark.parametrize("case", OTHER_TENSORS)
def test_sound_tensor_in_the_place_of_another_is_refused(bundle: Path, case: str) -> None:
    edit(bundle, OTHER_TENSORS[case])
    assert "expected " in refusal(bundle)


def test_draft_without_the_table_that_it_has_of_its_own_is_refused(bundle: Path) -> None:
    edit(bundle, lambda r: r["draft"].update(embedding="own"))
    assert "no embed_tokens.weight" in refusal(bundle)


def test_weight_file_that_is_a_link_out_of_the_bundle_is_refused(
    bundle: Path, tmp_path: Path
) -> None:
    (bundle / TARGET_FILE).rename(tmp_path / "elsewhere")
    (bundle / TARGET_FILE).symlink_to(tmp_path / "elsewhere")
    assert "a link out of the bundle" in refusal(bundle)
    (bundle / TARGET_FILE).unlink()
    (tmp_path / "elsewhere").rename(bundle / TARGET_FILE)
    (bundle / "weights").rename(tmp_path / "weights")
    (bundle / "weights").symlink_to(tmp_path / "weights")
    assert "a link out of the bundle" in refusal(bundle)


def test_bundle_behind_a_link_loads(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(bundle)
    assert trt_eagle3.load(tmp_path / "link").bundle.drafter


SPECIAL: dict[str, Callable[[Path], object]] = {
    "FIFO": replace_by_fifo,
    "/dev/zero": lambda f: replace_by_link(f, "/dev/zero"),
    "loop": lambda f: replace_by_link(f, f.name),
    "folder": lambda f: (f.unlink(), f.mkdir()),
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize(
    "name", [BUNDLE_FILE, TARGET_FILE, "target/model.onnx", "vision/model.onnx", "tuning.json"]
)
def test_special_file_in_a_bundle_is_refused_at_once(bundle: Path, name: str, kind: str) -> None:
    (bundle / "tuning.json").touch()
    SPECIAL[kind](bundle / name)
    assert str(bundle) in refusal(bundle)


def test_reference_bundle_that_names_a_device_or_another_file_is_refused(tmp_path: Path) -> None:
    bundle = build(tiny_config(), output=tmp_path, reference_weights=True).path
    sound = (bundle / BUNDLE_FILE).read_text()
    for place in ("dev/zero", "etc/passwd", "../etc/passwd", "/etc/passwd"):
        (bundle / BUNDLE_FILE).write_text(sound)

        def change(record: dict[str, Any], place: str = place) -> None:
            files = record["sources"]["target"]["files"]
            files[place] = files.pop(record["embedding"]["location"])
            record["embedding"]["location"] = place

        edit(bundle, change)
        refusal(bundle)


RECORDS = {
    "long": b'{"schema_version": 2, "x": "' + b"y" * (17 << 20) + b'"}',
    "nested": b'{"schema_version": 2, "target": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "many values": b'{"schema_version": 2, "x": [' + b"1," * 2_000_000 + b"1]}",
    "a key of 100 KB": b'{"schema_version": 2, "' + b"k" * 100_000 + b'": 1}',
    "a version of 100 KB": b'{"schema_version": "' + b"v" * 100_000 + b'"}',
    "a long number": b'{"schema_version": ' + b"1" * 5000 + b"}",
    "UTF-16": '{"schema_version": 2}'.encode("utf-16"),
    "a line end in a key": b'{"schema_version": 2, "a\\nb": 1}',
    "a surrogate in a key": b'{"schema_version": 2, "\\ud800": 1}',
}


@pytest.mark.parametrize("case", RECORDS)
def test_hostile_record_is_one_short_line_soon(bundle: Path, case: str) -> None:
    (bundle / BUNDLE_FILE).write_bytes(RECORDS[case])
    refusal(bundle).encode()


NUMBERS: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "a table of positions": (
        ("target", "vision", "num_position_embeddings"),
        -4,
        "target.vision.num_position_embeddings: expected a whole number from 0 to 2147483647, got "
        "-4",
    ),
    "a table that is no square": (
        ("target", "vision", "num_position_embeddings"),
        7,
        "target.vision.num_position_embeddings: expected a square number, got 7",
    ),
    "a block that is not there": (
        ("target", "vision", "level_blocks", 0),
        99,
        "target.vision.level_blocks: expected distinct blocks below",
    ),
    "heads": (("target", "layers", 0, "mixer", "num_heads"), 0, "num_heads: expected a whole"),
    "a width of 10^12": (("target", "layers", 0, "mlp", "intermediate_size"), 10**12, "got 1000"),
    "an id": (("target", "eos_token_ids", 0), -1, "target.eos_token_ids: expected a whole number"),
    "an epsilon": (("target", "norm", "eps"), -1.0, "norm.eps: expected a number from 0 to below"),
    "an endless angle": (
        ("draft", "rope", "attention_scaling"),
        float("inf"),
        "draft.rope.attention_scaling: expected a finite number, got inf",
    ),
    "a draft's layers": (("draft", "num_layers"), -1, "draft.num_layers: expected a whole number"),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_record_with_a_number_that_no_model_has_is_refused(bundle: Path, case: str) -> None:
    keys, value, message = NUMBERS[case]

    def change(record: dict[str, Any]) -> None:
        for key in keys[:-1]:
            record = record[key]
        record[keys[-1]] = value

    edit(bundle, change)
    found = refusal(bundle)
    assert message in found
    assert found.startswith(str(bundle / BUNDLE_FILE))


@pytest.mark.parametrize("where", ["file", "path", "checkpoint", "draft"])
def test_record_with_a_lone_surrogate_is_refused(bundle: Path, where: str) -> None:
    def change(record: dict[str, Any]) -> None:
        source = record["sources"]["target"]
        if where == "file":
            files = source["files"]
            files["weights/\ud800"] = files.pop(next(iter(files)))
        elif where == "draft":
            record["draft"]["producer"] = "\udfff"
        else:
            source[where] = "\ud800"

    edit(bundle, change)
    found = refusal(bundle)
    found.encode()
    assert "bundle.json: expected Unicode texts, got '" in found


# Graphs


def edit_graph(
    bundle: Path, change: Callable[[onnx.ModelProto], object], graph: str = "vision"
) -> None:
    file = bundle / graph / "model.onnx"
    model = onnx.load(file, load_external_data=False)
    change(model)
    file.write_bytes(model.SerializeToString())


def external(model: onnx.ModelProto) -> TensorProto:
    """The first weight, as ordinary external data."""
    proto = next(t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL)
    part = weight_expr(proto, descriptions(model)).parts[0]
    if {e.value for e in proto.external_data} & {DESCRIBED}:
        proto.CopyFrom(weight_initializer(proto.name, WeightExpr((part,), part.dtype)))
    return proto


def describe(model: onnx.ModelProto, **values: object) -> None:
    """Change fields of the first described part."""

    def change(expressions: dict[str, Any]) -> None:
        next(iter(expressions.values()))["parts"][0] |= values

    redescribe(model, change)


def redescribe(model: onnx.ModelProto, change: Callable[[dict[str, Any]], object]) -> None:
    entry = next(p for p in model.metadata_props if p.key == METADATA_KEY)
    expressions = json.loads(entry.value)
    change(expressions)
    entry.value = json.dumps(expressions)


def place(model: onnx.ModelProto, **values: object) -> None:
    """Change entries of the first external tensor; None removes one."""
    tensor = external(model)
    entries = {entry.key: entry.value for entry in tensor.external_data} | {
        k: str(v) for k, v in values.items()
    }
    del tensor.external_data[:]
    for key, value in entries.items():
        if value != "None":
            tensor.external_data.add(key=key, value=value)


def hide(model: onnx.ModelProto) -> None:
    """An external tensor in an attribute, which other runtimes would read."""
    tensor = TensorProto(
        name="hidden", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL
    )
    tensor.external_data.add(key="location", value="../../etc/passwd")
    model.graph.node.insert(0, helper.make_node("Constant", [], ["hidden"], value=tensor))


GRAPHS: dict[str, tuple[Callable[[onnx.ModelProto], object], str]] = {
    "a file elsewhere": (
        lambda m: place(m, location="../../../etc/passwd"),
        "is not among the sources",
    ),
    "an absolute file": (lambda m: place(m, location="/etc/passwd"), "is not among the sources"),
    "a device": (lambda m: place(m, location="/dev/zero"), "is not among the sources"),
    "a file that is not recorded": (
        lambda m: place(m, location="bundle.json"),
        "is not among the sources",
    ),
    "no file": (lambda m: place(m, location=None), "is not among the sources"),
    "no length": (lambda m: place(m, length=None), "no offset and length"),
    "no number": (lambda m: place(m, offset="x"), "no offset and length"),
    "bytes past the end": (lambda m: place(m, offset=1 << 50), "are not in weights"),
    "bytes before the start": (lambda m: place(m, offset=-8), "are not in weights"),
    "another length": (lambda m: place(m, length=8), "do not make 8 bytes"),
    "another shape": (lambda m: external(m).dims.append(1 << 40), "do not make"),
    "negative shape": (lambda m: external(m).dims.extend([-1, -1]), "do not make"),
    "another type": (
        lambda m: setattr(external(m), "data_type", TensorProto.DOUBLE),
        "do not make",
    ),
    "no type": (lambda m: setattr(external(m), "data_type", 999), "expected an element type"),
    "a described file elsewhere": (
        lambda m: describe(m, location="../../etc/passwd"),
        "is not among the sources",
    ),
    "described bytes past the end": (lambda m: describe(m, offset=1 << 50), "are not in weights"),
    "described bytes before the start": (lambda m: describe(m, offset=-8), "are not in weights"),
    "another described length": (lambda m: describe(m, num_bytes=8), "do not make 8 bytes"),
    "rows that are not there": (lambda m: describe(m, rows=[0, 1 << 40]), "rows 0 to"),
    "fewer rows than the graph's": (lambda m: describe(m, rows=[0, 1]), "as its metadata describe"),
    "no factor": (lambda m: describe(m, scale=0), "scale 0.0 is no factor"),
    "an unknown type": (lambda m: describe(m, dtype="int3"), "expected an element type"),
    "an unknown format": (
        lambda m: redescribe(m, lambda e: next(iter(e.values())).update(format="zip")),
        "weight format 'zip'",
    ),
    "no parts": (
        lambda m: redescribe(m, lambda e: next(iter(e.values())).update(parts=[])),
        "cannot be stacked",
    ),
    "metadata that are no JSON": (
        lambda m: setattr(m.metadata_props[0], "value", "{"),
        "metadata trt_eagle3.weights: ",
    ),
    "no description": (lambda m: redescribe(m, dict.clear), "does not describe it"),
    "a tensor in an attribute": (hide, "outside the graph's initializers"),
}


@pytest.mark.parametrize("case", GRAPHS)
def test_graph_whose_weights_are_not_in_recorded_files_is_refused(bundle: Path, case: str) -> None:
    change, message = GRAPHS[case]
    edit_graph(bundle, change)
    line = refusal(bundle)
    assert f"{bundle / 'vision/model.onnx'}: " in line
    assert message in line


def test_graph_that_is_none_is_refused(bundle: Path) -> None:
    (bundle / "vision/model.onnx").write_bytes(b"\xff" * 1000)
    assert "cannot load it" in refusal(bundle)


def test_ids_out_of_range_in_the_drafts_vocabulary_are_refused(bundle: Path) -> None:
    """Its header is sound: only the values are not."""
    record = read_bundle(bundle)
    d2t = record.draft_tensors["d2t"]
    data = bytearray((bundle / DRAFT_FILE).read_bytes())
    data[d2t.offset + 8 : d2t.offset + 16] = (1 << 40).to_bytes(8, "little")
    (bundle / DRAFT_FILE).unlink()
    (bundle / DRAFT_FILE).write_bytes(data)
    engine = trt_eagle3.load(bundle)
    with pytest.raises(UserError, match="d2t: ids out of range"):
        _ = engine.bundle.drafter
