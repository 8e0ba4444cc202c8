"""Read tensors of an untrusted ``pytorch_model.bin`` without running its code.

The size of what is read is bounded by the size of the file.
"""

from __future__ import annotations

import pickle
import pickletools
import zipfile
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO

from trt_eagle3.checkpoint.tensor_file import Content, tensor_content
from trt_eagle3.errors import UserError, clip
from trt_eagle3.io.bounded_read import open_regular

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["read_pickle"]

_MAX_OPCODES = 200_000  # of a pickle; a draft's has a few thousand
_MAX_ARGUMENT = 1 << 20  # bytes of one text or number in it
# magic number, protocol, system, tensors; then the storages, whose pickles hold only their keys
_LEGACY_PICKLES = 4


def read_pickle(file: Path) -> dict[str, Content]:
    """Open the tensors of a PyTorch file. Their bytes are read lazily.

    Raises:
        UserError: the file is not regular, is not a mapping of names to plain tensors, would run
            code, or holds less data than its tensors claim (strides of 0, compressed records,
            endless lists).
            lists).
    """
    _check_pickles(file)
    tensors = _unpickled(file)
    contents = {name: _content(file, name, tensor) for name, tensor in tensors.items()}
    claimed, there = sum(_num_bytes(t) for t in tensors.values()), file.stat().st_size
    if claimed > 2 * there:  # an embedding that is also the head counts twice
        raise UserError(
            f"{file}: its tensors claim {claimed} bytes, the file has {there}. Convert it to "
            "safetensors."
        )
    return contents


def _check_pickles(file: Path) -> None:
    """Reject oversized or compressed pickles before they are loaded."""
    with open_regular(file) as stream:
        try:
            if zipfile.is_zipfile(stream):
                _check_zip(stream)
                return
            stream.seek(0)
            for _ in range(_LEGACY_PICKLES):
                _count_opcodes(stream)
        except Exception as error:  # zipfile and pickletools raise many kinds for untrusted bytes
            raise _unsound(file, error) from error


def _check_zip(stream: BinaryIO) -> None:
    with zipfile.ZipFile(stream) as archive:
        for record in archive.infolist():
            if (
                record.compress_type != zipfile.ZIP_STORED
                or record.file_size != record.compress_size
            ):
                raise ValueError(f"{clip(record.filename, 80)} is compressed")
            if record.filename.endswith(".pkl"):
                with archive.open(record) as pickled:
                    _count_opcodes(pickled)


def _count_opcodes(stream: IO[bytes]) -> None:
    for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
        size = len(argument) if isinstance(argument, str | bytes | bytearray) else 0
        if count >= _MAX_OPCODES or size > _MAX_ARGUMENT:
            raise ValueError(
                f"a pickle of more than {_MAX_OPCODES} operations, or of long texts ({opcode.name})"
            )


def _unpickled(file: Path) -> dict[str, Tensor]:
    import torch

    try:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before 2020 is not a zip file and cannot be mapped
            state = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{file}: holds more than tensors. It is not read, because it could run code. Convert "
            "it to safetensors where you trust it."
        ) from error
    except Exception as error:
        # untrusted bytes raise many kinds of error, including MemoryError and AssertionError
        raise _unsound(file, error) from error
    items = state.items() if isinstance(state, dict) else [(None, None)]
    if not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in items
    ):
        raise UserError(
            f"{file}: expected a mapping of names to tensors. Convert it to safetensors."
        )
    return dict(items)


def _content(file: Path, name: str, tensor: Tensor) -> Content:
    shown = clip(name)
    if (
        tensor.is_nested
        or tensor.is_meta
        or str(tensor.layout) != "torch.strided"
        or tensor.is_neg()
    ):
        raise UserError(f"{file}: {shown}: not a plain tensor. Convert it to safetensors.")
    if tensor.is_floating_point() and tensor.element_size() == 1:
        raise UserError(
            f"{file}: {shown}: of type {tensor.dtype}. Use the unquantised draft, in floats."
        )
    there = tensor.untyped_storage().nbytes()
    if _num_bytes(tensor) > there:
        raise UserError(
            f"{file}: {shown}: shape {clip(list(tensor.shape), 80)} claims {_num_bytes(tensor)} "
            f"bytes, {there} are stored (its rows repeat). Convert it to safetensors."
        )
    try:
        return tensor_content(tensor)
    except UserError as error:
        raise UserError(
            f"{file}: {shown}: {error}. Use the unquantised draft, in floats."
        ) from error


def _num_bytes(tensor: Tensor) -> int:
    return prod(tensor.shape) * tensor.element_size()


def _unsound(file: Path, error: Exception) -> UserError:
    reason = clip(" ".join(str(error).split()) or type(error).__name__, 120)
    return UserError(f"{file}: not a valid {file.name}: {reason}. Download it again.")
