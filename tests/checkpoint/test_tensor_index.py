"""The index knows where every tensor lies, loads none, and refuses files that are not sound."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from trt_eagle3.checkpoint.tensor_file import (
    array_content,
    read_integers,
    ref_content,
    tensor_content,
    write_tensors,
)
from trt_eagle3.checkpoint.tensor_index import open_index, read_tensor
from trt_eagle3.errors import UserError

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c": torch.tensor([True, False, True]),
    "d": torch.tensor(7),
    "e": torch.zeros(0, 4, dtype=torch.float16),
}


def _file(
    folder: Path, tensors: dict[str, torch.Tensor] | None = None, name: str = "model.safetensors"
) -> Path:
    save_file(TENSORS if tensors is None else tensors, folder / name)
    return folder / name


def _raw(folder: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return file


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def test_single_file_is_indexed_and_read(tmp_path: Path) -> None:
    _file(tmp_path)
    index = open_index(tmp_path)
    assert index.keys() == TENSORS.keys()
    assert (index["b"].dtype, index["b"].shape, index["b"].num_bytes) == ("BF16", (2,), 4)
    assert all(_same(read_tensor(index[name]), tensor) for name, tensor in TENSORS.items())
    with index["a"].file.open("rb") as stream:
        stream.seek(index["a"].offset)
        assert stream.read(index["a"].num_bytes) == TENSORS["a"].numpy().tobytes()


def test_shards_are_indexed_by_their_index(tmp_path: Path) -> None:
    _file(tmp_path, {"a": TENSORS["a"]}, "one.safetensors")
    _file(tmp_path, {"b": TENSORS["b"]}, "two.safetensors")
    _file(tmp_path, {"other": TENSORS["b"]}, "not-named.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    index = open_index(tmp_path)
    assert index.keys() == {"a", "b"}
    assert _same(read_tensor(index["b"]), TENSORS["b"])


@given(
    st.dictionaries(
        st.text("abc.", min_size=1, max_size=9), st.lists(st.integers(0, 5), max_size=3), min_size=1
    )
)
def test_written_files_are_read_by_safetensors_too(shapes: dict[str, list[int]]) -> None:
    import tempfile

    from safetensors.torch import load_file

    kinds = (torch.float32, torch.bfloat16, torch.bool, torch.int64)
    tensors = {
        name: torch.ones(shape, dtype=kinds[i % 4])
        for i, (name, shape) in enumerate(shapes.items())
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tensors(
            folder / "model.safetensors", {n: tensor_content(t) for n, t in tensors.items()}
        )
        loaded, index = load_file(folder / "model.safetensors"), open_index(folder)
        assert loaded.keys() == tensors.keys() == index.keys()
        assert all(_same(loaded[n], t) for n, t in tensors.items())
        copy = folder / "copy"
        write_tensors(copy / "model.safetensors", {n: ref_content(ref) for n, ref in index.items()})
        assert (copy / "model.safetensors").read_bytes() == (
            folder / "model.safetensors"
        ).read_bytes()


def test_integers_are_read_whatever_their_width(tmp_path: Path) -> None:
    values = torch.tensor([3, 1, 2])
    _file(tmp_path, {"long": values, "int": values.int(), "bool": values > 1})
    index = open_index(tmp_path)
    assert [read_integers(index[n]).tolist() for n in ("long", "int", "bool")] == [
        [3, 1, 2],
        [3, 1, 2],
        [1, 0, 1],
    ]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Any:
        yield b"1234"
        raise OSError(28, "No space left on device")

    content = array_content(read_integers(open_index(_file(tmp_path).parent)["d"]))
    with pytest.raises(UserError, match="No space left"):
        write_tensors(tmp_path / "new" / "x.safetensors", {"x": type(content)("F32", (2,), broken)})
    assert not list((tmp_path / "new").iterdir())


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing there": (lambda f: f.mkdir(exist_ok=True), "no .*safetensors"),
    "cut in the data": (lambda f: _cut(_file(f), -3), "tensors end at byte"),
    "cut in the header": (lambda f: _cut(_file(f), 20), "header would be"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "header would be"),
    "header too long": (lambda f: _raw(f, {}, length=1 << 40), "header would be"),
    "not JSON": (lambda f: _raw(f, b"{nonsense}"), "not JSON"),
    "deeply nested": (lambda f: _raw(f, b"[" * 200_000), "nested deeper than"),
    "not a mapping": (lambda f: _raw(f, [1]), "not a mapping"),
    "twice": (
        lambda f: _raw(
            f,
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        ),
        "twice",
    ),
    "overlap": (
        lambda f: _raw(
            f,
            {
                n: {"dtype": "U8", "shape": [2], "data_offsets": [i, i + 2]}
                for i, n in enumerate("ab")
            },
        ),
        "b does not begin where",
    ),
    "gap": (
        lambda f: _raw(f, {"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, b"12"),
        "does not begin",
    ),
    "surplus data": (
        lambda f: _raw(f, {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"12"),
        "end at byte",
    ),
    "wrong size": (
        lambda f: _raw(f, {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
        "agree",
    ),
    "unknown type": (
        lambda f: _raw(f, {"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
        "agree",
    ),
    "negative shape": (
        lambda f: _raw(f, {"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}, b"1"),
        "agree",
    ),
    "negative shape of the right size": (
        lambda f: _raw(f, {"a": {"dtype": "U8", "shape": [-1, -1], "data_offsets": [0, 1]}}, b"1"),
        "agree",
    ),
    "words as shape": (
        lambda f: _raw(f, {"a": {"dtype": "U8", "shape": ["1"], "data_offsets": [0, 1]}}, b"1"),
        "agree",
    ),
    "two files, one name": (
        lambda f: (_file(f, name="one.safetensors"), _file(f, name="other.safetensors")),
        "is in both",
    ),
    "index is no index": (lambda f: _index(f, b"[]"), "expected a JSON object, got list"),
    "index without a map": (lambda f: _index(f, b'{"weight_map": [1]}'), "not a safetensors index"),
    "index of numbers": (
        lambda f: _index(f, b'{"weight_map": {"a": 1}}'),
        "not a safetensors index",
    ),
    "index names a folder": (lambda f: ((f / "a").mkdir(), _index(f, {"a": "a"})), "got a folder"),
    "index names no file name": (lambda f: _index(f, {"a": "x\0y"}), "not a file name"),
    "index names a long file name": (lambda f: _index(f, {"a": "x" * 9999}), "not a file name"),
    "index is a FIFO": (
        lambda f: (_file(f), _fifo(f / "model.safetensors.index.json")),
        "got a FIFO",
    ),
    "weights are a FIFO": (lambda f: _fifo(f / "model.safetensors"), "got a FIFO"),
    "weights are a device": (
        lambda f: (f / "model.safetensors").symlink_to("/dev/zero"),
        "got a device",
    ),
    "weights are a folder": (lambda f: (f / "model.safetensors").mkdir(), "got a folder"),
    "endless offsets": (
        lambda f: _raw(f, b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,Infinity]}}', b"1"),
        "agree",
    ),
    "offsets that are no numbers": (
        lambda f: _raw(f, b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[NaN,1e400]}}', b"1"),
        "agree",
    ),
    "fractional offsets": (
        lambda f: _raw(f, b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1.0]}}', b"1"),
        "agree",
    ),
    "offsets of texts": (
        lambda f: _raw(f, b'{"a":{"dtype":"U8","shape":[1],"data_offsets":"01"}}', b"1"),
        "agree",
    ),
    "list as a type": (
        lambda f: _raw(f, b'{"a":{"dtype":["U8"],"shape":[1],"data_offsets":[0,1]}}', b"1"),
        "agree",
    ),
    "flags as a shape": (
        lambda f: _raw(f, b'{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', b"1"),
        "agree",
    ),
    "endless dimensions": (
        lambda f: _raw(
            f, {"a": {"dtype": "U8", "shape": [1] * 400_000, "data_offsets": [0, 1]}}, b"1"
        ),
        "agree",
    ),
    "UTF-16": (lambda f: _raw(f, "{}".encode("utf-16")), "not UTF-8"),
    "metadata of numbers": (
        lambda f: _raw(f, {"__metadata__": {"format": 1}}),
        "__metadata__: expected texts",
    ),
    "metadata that is a list": (
        lambda f: _raw(f, {"__metadata__": []}),
        "__metadata__: expected texts",
    ),
    "metadata twice": (lambda f: _raw(f, b'{"__metadata__":{},"__metadata__":{}}'), "twice"),
    "long name": (lambda f: _raw(f, {"n" * 900_000: 1}), "agree"),
    "surrogate as a name": (lambda f: _raw(f, {"\ud800\n": 1}), "agree"),
    "many tensors": (
        lambda f: _raw(f, _entries(100_001, '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}')),
        "100001 tensors, expected at most 100000",
    ),
    "endless tensors": (
        lambda f: _raw(f, _entries(1_000_001, "0")),
        "more than 1000000 values",
    ),
    "index names no shard": (
        lambda f: _index(f, {"a": "gone.safetensors"}),
        "gone.safetensors is missing",
    ),
    "index names another folder": (
        lambda f: _index(f, {"a": "../model.safetensors"}),
        "not a file name",
    ),
    "index names no tensor": (
        lambda f: (_file(f), _index(f, {"zz": "model.safetensors"})),
        "lacks zz, which the index places there",
    ),
    "shard holds more": (
        lambda f: (_file(f), _index(f, {"a": "model.safetensors"})),
        "does not name",
    ),
    "shard holds another's": (
        lambda f: (
            _file(f, {"a": TENSORS["a"]}, "1.safetensors"),
            _file(f, name="2.safetensors"),
            _index(f, {name: f"{1 + (name != 'a')}.safetensors" for name in TENSORS}),
        ),
        r"holds a, which .* names in 1\.safetensors",
    ),
    "shards beside a whole file": (
        lambda f: (_file(f), _file(f, name="1.safetensors"), _index(f, {"a": "1.safetensors"})),
        "two sets of weights; transformers loads the former",
    ),
    "pickle": (
        lambda f: (f / "pytorch_model.bin").write_bytes(b""),
        "It has pytorch_model.bin: load it with",
    ),
    "pointer": (
        lambda f: (f / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid x\n"
        ),
        "a pointer of Git LFS",
    ),
}


def _entries(count: int, value: str) -> bytes:
    """A JSON object of so many keys; ``json.dumps`` takes seconds."""
    return ("{" + ",".join(f'"{i}":{value}' for i in range(count)) + "}").encode()


def _fifo(file: Path) -> None:
    os.mkfifo(file)


def _cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def _index(folder: Path, weight_map: dict[str, str] | bytes) -> None:
    raw = (
        weight_map
        if isinstance(weight_map, bytes)
        else json.dumps({"weight_map": weight_map}).encode()
    )
    (folder / "model.safetensors.index.json").write_bytes(raw)


@pytest.mark.parametrize(
    "beside", ["adapter_model.safetensors", "optimizer.safetensors", "consolidated.safetensors"]
)
def test_open_index_files_beside_the_whole_model_are_not_read(beside: str, tmp_path: Path) -> None:
    """As transformers loads it."""
    _file(tmp_path)
    (tmp_path / beside).write_bytes(b"")
    assert open_index(tmp_path).keys() == TENSORS.keys()
    _file(tmp_path, {"a": TENSORS["a"] + 1, "base.lora_A.weight": TENSORS["a"]}, beside)
    index = open_index(tmp_path)
    assert index.keys() == TENSORS.keys()
    assert _same(read_tensor(index["a"]), TENSORS["a"])


@pytest.mark.parametrize("beside", ["adapter_model.safetensors", "optimizer-2.safetensors"])
def test_open_index_leftovers_of_training_are_no_weights(beside: str, tmp_path: Path) -> None:
    _file(tmp_path, {"lora_A.weight": TENSORS["a"]}, beside)
    with pytest.raises(UserError, match=r"not a checkpoint: no weights in it, only"):
        open_index(tmp_path)
    _file(tmp_path, name="weights.safetensors")
    assert open_index(tmp_path).keys() == TENSORS.keys()


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_by_name(case: str, tmp_path: Path) -> None:
    spoil, message = BROKEN[case]
    spoil(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        open_index(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value)) < 400 + 2 * len(str(tmp_path))
    assert str(caught.value).isprintable()
