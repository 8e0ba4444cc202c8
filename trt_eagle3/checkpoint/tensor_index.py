"""A lazy index over safetensors: the place of each tensor, without loading any."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_eagle3.dtype import COMPUTE_DTYPES, DTYPES, dtype_of_safetensors
from trt_eagle3.errors import UserError, clip, quote
from trt_eagle3.io.bounded_read import open_regular
from trt_eagle3.io.json_file import parse_json, read_json_object

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FLOAT_DTYPES", "TensorRef", "open_file", "open_index", "read_tensor", "weight_files"]

FLOAT_DTYPES = tuple(dtype.safetensors for dtype in COMPUTE_DTYPES)
"""Types of dense weights, by their safetensors names."""

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = f"{_SINGLE_FILE}.index.json"
# left by training: optimizer state, and adapters, which need their base model
_LEFTOVERS = ("adapter_model", "optimizer")
_MAX_HEADER_BYTES = 32 << 20  # safetensors' own limit is 100 MB, which takes gigabytes to parse
# per file; the largest mixtures of experts have as many, in dozens of files
_MAX_TENSORS = 100_000
_MAX_DIMENSIONS = 8
_MAX_NAME_LEN = 200  # bytes of a shard's name
_MAX_OFFSET = 1 << 62
_SPELLINGS = {dtype.safetensors for dtype in DTYPES}


@dataclass(frozen=True)
class TensorRef:
    """One tensor's place on disk.

    Attributes:
        name: the name in the file.
        file: the safetensors file.
        offset: first byte in the file (header included).
        num_bytes: length in bytes.
        dtype: safetensors spelling (``F32``, ``BF16``, ``F16``, ``I64``, ``BOOL``, ...).
        shape: row-major.
    """

    name: str
    file: Path
    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def stored(self) -> tuple[TensorRef, ...]:
        """Every tensor on disk that this is read from: itself; for a quantised weight, several."""
        return (self,)


def open_index(directory: Path) -> Mapping[str, TensorRef]:
    """Index the safetensors of a checkpoint: a sharded index, else ``weight_files``.

    Raises:
        UserError: there is no file, or a file is truncated, corrupt, or contradicts the sharded
            index.
    """
    index_file = directory / _INDEX_FILE
    if index_file.exists():
        return _open_sharded(directory, index_file)
    files = weight_files(directory)
    if not files:
        raise _no_weights(directory)
    tensors: dict[str, TensorRef] = {}
    for file in files:
        for name, ref in _read_header(file).items():
            if name in tensors:
                raise UserError(
                    f"{clip(name)}: is in both {tensors[name].file.name} and {file.name} of "
                    f"{directory}"
                )
            tensors[name] = ref
    return tensors


def _no_weights(directory: Path) -> UserError:
    pickle = next(iter(sorted(directory.glob("pytorch_model*.bin"))), None)
    other = next(iter(sorted(directory.glob("*.safetensors"))), None)
    found, fix = "no *.safetensors in it", "Name the folder that holds the weights."
    if pickle is not None:
        fix = (
            f"It has {pickle.name}: load it with transformers and save_pretrained it as "
            "safetensors."
        )
    elif other is not None:
        found = f"no weights in it, only {clip(other.name)}"
        fix = "Merge the adapter into its base model, and name the folder of the merged model."
    return UserError(f"{directory}: not a checkpoint: {found}. {fix}")


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint without a sharded index.

    If ``model.safetensors`` exists, it is the only one, as in transformers. Otherwise these are all
    files except those that training leaves behind.
    """
    whole = directory / _SINGLE_FILE
    if os.path.lexists(whole):
        return [whole]
    files = sorted(directory.glob("*.safetensors"))
    return [file for file in files if not file.name.startswith(_LEFTOVERS)]


def open_file(file: Path) -> Mapping[str, TensorRef]:
    """Index one safetensors file.

    Raises:
        UserError: the file is truncated, corrupt, or not readable.
    """
    return _read_header(file)


def read_tensor(ref: TensorRef) -> Tensor:
    """Load one tensor onto the CPU from the place in ``ref``, without reading a header.

    Raises:
        UserError: torch lacks the type, or the file is too short.
    """
    import torch

    dtype = dtype_of_safetensors(ref.dtype).torch
    with open_regular(ref.file) as stream:
        stream.seek(ref.offset)
        raw = bytearray(stream.read(ref.num_bytes))
        if len(raw) != ref.num_bytes:
            raise UserError(f"{ref.file}: {clip(ref.name)} is cut short. Download it again.")
    return (
        torch.frombuffer(raw, dtype=dtype).reshape(ref.shape)
        if raw
        else torch.empty(ref.shape, dtype=dtype)
    )


def _open_sharded(directory: Path, index_file: Path) -> dict[str, TensorRef]:
    shards = _read_weight_map(index_file)
    if _SINGLE_FILE not in shards.values() and (directory / _SINGLE_FILE).exists():
        raise UserError(
            f"{directory}: {_SINGLE_FILE} and the shards of {_INDEX_FILE} are two sets of weights; "
            "transformers loads the former. Remove the one that is stale."
        )
    headers: dict[str, dict[str, TensorRef]] = {}
    for shard in sorted(set(shards.values())):
        if (
            Path(shard).name != shard
            or not shard.isprintable()
            or len(shard.encode()) > _MAX_NAME_LEN
        ):
            raise UserError(
                f"{index_file}: shard {quote(shard)} is not a file name of its own folder"
            )
        if not (directory / shard).exists():
            raise UserError(f"{index_file}: shard {shard} is missing. Download it again.")
        headers[shard] = _read_header(directory / shard)
    tensors: dict[str, TensorRef] = {}
    for name, shard in shards.items():
        if name not in headers[shard]:
            raise UserError(
                f"{index_file}: {shard} lacks {clip(name)}, which the index places there. Download "
                "it again."
            )
        tensors[name] = headers[shard][name]
    for shard, found in headers.items():
        for name in sorted(found):
            if shards.get(name) != shard:
                where = f"names in {shards[name]}" if name in shards else "does not name"
                holds = f"{directory / shard}: holds {clip(name)}"
                raise UserError(f"{holds}, which {index_file.name} {where}. Remove it.")
    return tensors


def _read_weight_map(index_file: Path) -> dict[str, str]:
    """Read tensor name -> shard."""
    try:
        shards = read_json_object(index_file).get("weight_map")
    except OSError as error:
        raise UserError(f"{index_file}: cannot read it: {error.strerror}") from error
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise UserError(
            f"{index_file}: not a safetensors index: expected weight_map, tensor names to file "
            "names. Download it again."
        )
    return shards


def _read_header(file: Path) -> dict[str, TensorRef]:
    def bad(what: str) -> UserError:
        return UserError(f"{file}: not a valid safetensors file: {what}. Download it again.")

    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            sound = 2 <= length <= min(_MAX_HEADER_BYTES, size - 8)
            text = stream.read(length) if sound else b""
    except OSError as error:
        raise UserError(f"{file}: cannot read it: {error.strerror}") from error
    if prefix == b"version ":  # https://git-lfs.github.com/spec/v1
        raise UserError(
            f"{file}: a pointer of Git LFS, not the weights. Fetch them: git lfs pull, or hf "
            "download."
        )
    if not sound:
        raise bad(
            f"its header would be {length} bytes long (at most {_MAX_HEADER_BYTES}), the file is "
            f"{size}"
        )
    entries = _parse_header(text, file)
    tensors: dict[str, TensorRef] = {}
    end = 0
    for name, entry in sorted(entries.items(), key=_offsets):
        ref = _tensor_ref(file, name, entry, 8 + length)
        if ref is None:
            raise bad(f"the entry of {clip(name)} is not a type, a shape and offsets that agree")
        if ref.offset != 8 + length + end:
            raise bad(f"{clip(name)} does not begin where the tensor before it ends")
        end += ref.num_bytes
        tensors[name] = ref
    if 8 + length + end != size:
        raise bad(f"its tensors end at byte {8 + length + end}, the file at {size}")
    return tensors


def _parse_header(text: bytes, file: Path) -> dict[str, Any]:
    """Parse tensor name -> its entry."""
    name = f"{file}: not a valid safetensors file: its header"
    entries = parse_json(text, name)
    if not isinstance(entries, dict):
        raise UserError(f"{name} is not a mapping. Download it again.")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise UserError(f"{name}: __metadata__: expected texts. Download it again.")
    if len(entries) > _MAX_TENSORS:
        raise UserError(
            f"{name}: {len(entries)} tensors, expected at most {_MAX_TENSORS}. Is it the right "
            "file?"
        )
    return entries


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_OFFSET


def _offsets(item: tuple[str, Any]) -> tuple[int, int]:
    """Return first byte and end of an entry's data; (-1, -1) if it has none."""
    entry = item[1]
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        return -1, -1
    return offsets[0], offsets[1]


def _tensor_ref(file: Path, name: str, entry: Any, data_start: int) -> TensorRef | None:
    start, end = _offsets((name, entry))
    if start < 0:
        return None
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str) or dtype not in _SPELLINGS:
        return None
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(map(_is_size, shape)):
        return None
    num_bytes = dtype_of_safetensors(dtype).num_bytes(prod(shape))
    if end - start != num_bytes:
        return None
    return TensorRef(name, file, data_start + start, num_bytes, dtype, tuple(shape))
