"""Check a bundle's weights. Only recorded files are read, and only at the tensor positions that
their headers give.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.checkpoint.tensor_index import FLOAT_DTYPES, TensorRef, open_file
from trt_eagle3.drafts.registry import DRAFT_GRAPHS, kind_of
from trt_eagle3.engine.bundle.record import BUNDLE_FILE, BundleRecord, FileRecord, TensorRecord
from trt_eagle3.errors import UserError, clip, quote
from trt_eagle3.graph.weights import DESCRIBED, WeightExpr, descriptions, weight_expr
from trt_eagle3.io.bounded_read import open_regular, read_bounded
from trt_eagle3.spec import TargetSpec

if TYPE_CHECKING:
    import onnx

__all__ = ["GRAPHS", "check_graphs", "check_tables", "check_weights", "header_digest"]

GRAPHS = ("target", "vision", *DRAFT_GRAPHS)
"""Folders of a bundle that may hold a graph."""
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_MAX_LOCATION_LEN, _MAX_PATH_LEN = 1024, 700
_MAX_GRAPH_BYTES = (1 << 31) - 1  # protobuf's own limit


def header_digest(file: Path) -> str:
    """Hash a safetensors header (sha256): names, types, shapes and offsets of all its tensors.

    If the header would end after the file, or exceed the limit of safetensors, only the header's
    length is hashed.
    """
    with open_regular(file) as stream:
        return _digest(stream)


def check_weights(bundle: Path, record: BundleRecord) -> None:
    """Check that weight files are unchanged, and that tensors are where ``bundle.json`` has them.

    Raises:
        UserError: naming the first mismatch.
    """
    files = record.weight_files()
    for location, expected in files.items():
        file = _locate(bundle, record, location)
        try:
            _check_file(file, expected, record)
        except OSError as error:
            raise UserError(
                f"{clip(file, _MAX_PATH_LEN)}: cannot read it: {error.strerror}. Fix its "
                "permissions."
            ) from error
    headers: dict[str, Mapping[str, TensorRef]] = {}
    for name, tensor in {"embedding": record.embedding, **record.draft_tensors}.items():
        if tensor.location not in files:
            raise _refusal(
                bundle, f"{clip(name)}: its file {quote(tensor.location)} is not among the sources"
            )
        if tensor.location not in headers:
            headers[tensor.location] = open_file(_locate(bundle, record, tensor.location))
        _check_tensor(bundle, name, tensor, headers[tensor.location].get(tensor.name))


def check_graphs(bundle: Path, record: BundleRecord) -> None:
    """Check that the weights of all graphs lie within recorded files.

    Raises:
        UserError: a weight does not (the message names the graph and the tensor), or a graph cannot
            be read.
    """
    files = record.weight_files()
    for file in (bundle / graph / "model.onnx" for graph in GRAPHS):
        if os.path.lexists(file):
            _check_graph(file, _load_graph(file), files)


def check_tables(
    bundle: Path, record: BundleRecord, spec: TargetSpec, manifest: DraftManifest | None
) -> None:
    """Check shape and type of the tensors that are read outside the graphs, against target and
    draft.

    Raises:
        UserError: naming the first mismatch.
    """
    tensors = {"embedding": record.embedding}
    shapes: dict[str, tuple[int, ...]] = {"embedding": (spec.vocab_size, spec.hidden_size)}
    if manifest is not None:
        tensors |= {f"draft {name}": tensor for name, tensor in record.draft_tensors.items()}
        of_draft = {**kind_of(manifest).shapes(manifest), "d2t": (manifest.draft_vocab_size,)}
        shapes |= {f"draft {name}": shape for name, shape in of_draft.items()}
        if manifest.embedding == "own" and "embed_tokens.weight" not in record.draft_tensors:
            raise _refusal(
                bundle, "draft_tensors: no embed_tokens.weight, but the draft has its own table"
            )
    for name, tensor in tensors.items():
        kinds = ("I64", "I32") if name == "draft d2t" else FLOAT_DTYPES
        if tensor.shape != shapes.get(name, tensor.shape) or tensor.dtype not in kinds:
            expected, got = (
                f"{' or '.join(kinds)} {list(shapes.get(name, tensor.shape))}",
                list(tensor.shape),
            )
            raise _refusal(
                bundle, f"{clip(name)}: expected {expected}, got {quote(tensor.dtype)} {quote(got)}"
            )


def _locate(bundle: Path, record: BundleRecord, location: str) -> Path:
    """Return the file at ``location``; in a contained bundle it must lie within the bundle."""
    place = PurePosixPath(location)
    plain = "\0" not in location and str(place) == location and len(location) <= _MAX_LOCATION_LEN
    if not plain or place.is_absolute() or ".." in place.parts:
        raise _refusal(
            bundle, f"{quote(location)}: expected a plain relative path of a weight file"
        )
    root = record.weights_root(bundle)
    file = root / location
    if not Path(os.path.realpath(file)).is_relative_to(os.path.realpath(root)):
        raise UserError(
            f"{clip(file, _MAX_PATH_LEN)}: a link out of the bundle. Copy the file there, or "
            "rebuild: trt-eagle3 build"
        )
    return file


def _check_file(file: Path, expected: FileRecord, record: BundleRecord) -> None:
    shown = clip(file, _MAX_PATH_LEN)
    fix = f"Rebuild: trt-eagle3 build --config <the config of {record.config.name}>"
    try:
        stream = open_regular(file)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{shown}: a weight file of this bundle is missing. {fix}") from error
    with stream:
        size = os.fstat(stream.fileno()).st_size
        if size != expected.size:
            raise UserError(f"{shown}: expected {expected.size} bytes, got {size}. {fix}")
        if _digest(stream) != expected.header_sha256:
            raise UserError(
                f"{shown}: its safetensors header is not the one this bundle was built with. {fix}"
            )


def _digest(stream: BinaryIO) -> str:
    size = stream.read(8)
    length = int.from_bytes(size, "little")
    whole = os.fstat(stream.fileno()).st_size
    sound = length <= min(whole - 8, _MAX_HEADER_BYTES)
    return hashlib.sha256(size + (stream.read(length) if sound else b"")).hexdigest()


def _check_tensor(bundle: Path, name: str, tensor: TensorRecord, found: TensorRef | None) -> None:
    """Refuse a record that differs from the file's own header."""
    if found is None:
        raise _refusal(
            bundle, f"{clip(name)}: {quote(tensor.location)} holds no tensor {quote(tensor.name)}"
        )
    for field in ("offset", "num_bytes", "dtype", "shape"):
        expected, got = getattr(found, field), getattr(tensor, field)
        if expected != got:
            raise _refusal(
                bundle,
                f"{clip(name)}: {field}: expected {expected} as in its file's header, got "
                f"{quote(got)}",
            )


def _load_graph(file: Path) -> onnx.ModelProto:
    import onnx

    try:
        return onnx.load_model_from_string(read_bounded(file, _MAX_GRAPH_BYTES))
    except (UserError, OSError) as error:
        raise UserError(f"{file}: cannot read the graph: {clip(error)}") from error
    except MemoryError:
        raise
    except Exception as error:  # protobuf's own errors have no base class but Exception
        raise UserError(f"{file}: cannot load it: {clip(error)}. Rebuild the bundle.") from error


def _check_graph(file: Path, model: onnx.ModelProto, files: Mapping[str, FileRecord]) -> None:
    def bad(tensor: onnx.TensorProto, what: str) -> UserError:
        return UserError(f"{file}: {clip(tensor.name)}: {what}. Rebuild: trt-eagle3 build")

    try:
        described = descriptions(model)
    except UserError as error:
        raise UserError(f"{file}: {error}. Rebuild: trt-eagle3 build") from error
    for tensor in model.graph.initializer:
        if tensor.data_location == tensor.EXTERNAL:
            try:
                _check_external(tensor, described, files)
            except ValueError as error:
                raise bad(tensor, str(error)) from error
    for tensor in _other_tensors(model):
        if tensor.data_location == tensor.EXTERNAL:
            raise bad(tensor, "external data outside the graph's initializers")


def _check_external(
    tensor: onnx.TensorProto, described: Mapping[str, WeightExpr], files: Mapping[str, FileRecord]
) -> None:
    """Refuse a weight that is read from a file that is not recorded.

    Raises:
        ValueError: naming the file, or the bytes that are out of range.
    """
    place = {entry.key: entry.value for entry in tensor.external_data}
    if place.get("location") != DESCRIBED:
        _check_location(place.get("location", ""), files)
    expr = weight_expr(tensor, described)
    for part in expr.parts:
        for stored in part.stored:
            _check_location(stored.location, files)
            end, size = stored.offset + stored.num_bytes, files[stored.location].size
            if stored.offset < 0 or end > size:
                where = f"bytes {stored.offset} to {end} are not in {stored.location} of {size}"
                raise ValueError(where)


def _check_location(location: str, files: Mapping[str, FileRecord]) -> None:
    if location not in files:
        raise ValueError(f"its file {quote(location)} is not among the sources of {BUNDLE_FILE}")


def _other_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield all tensors of a model except its graph's initializers: those in attributes, those in
    nested graphs, and sparse ones.
    """
    inner: list[Any] = [model.graph, *model.functions]
    sparse = list(model.graph.sparse_initializer)
    while inner:
        for attribute in (a for node in inner.pop().node for a in node.attribute):
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            sparse += [*attribute.sparse_tensors, attribute.sparse_tensor]
            for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
                yield from graph.initializer
                sparse += graph.sparse_initializer
                inner.append(graph)
    for tensor in sparse:
        yield from (tensor.values, tensor.indices)


def _refusal(bundle: Path, what: str) -> UserError:
    return UserError(f"{bundle / BUNDLE_FILE}: {what}. Rebuild: trt-eagle3 build")
