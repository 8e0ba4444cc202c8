"""Checks of the bundle: its metadata, every weight on disk, every table row, tokenizer files.

An answer visits few tokens. A rare token with a wrong embedding, or a tokenizer of another
revision, changes nothing until it is used. Comparing everything is cheap. Shapes: V vocab, Vd draft
vocab, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor

from trt_eagle3.checkpoint.manifest import manifest_to_dict
from trt_eagle3.checkpoint.target import target_to_dict
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.drafts.registry import kind_of
from trt_eagle3.engine.bundle.check import header_digest
from trt_eagle3.engine.bundle.weight_locations import TABLE_FILE
from trt_eagle3.graph.activations import read_activations
from trt_eagle3.multimodal.processor_files import PROCESSOR_FILES
from trt_eagle3.parity.checks.check_recorder import Measurements
from trt_eagle3.parity.checks.evidence import Evidence
from trt_eagle3.parity.metrics import Compared
from trt_eagle3.parity.reference.dequantise import read_values

__all__ = ["check_files", "check_meaning", "check_tables"]

_READING = ("sources", "warnings")  # how the manifest was found; does not affect its meaning
_CHUNK_BYTES = 1 << 24
_ROWS = 8192  # table rows per chunk: 8192 x 4096 in float32 are 134 MB

Refs = Mapping[str, TensorRef]


def check_meaning(e: Evidence, m: Measurements) -> None:
    """Compare the bundle's target and draft metadata with the checkpoints, read again.

    Also compares the engine's metadata with its config. The engine's dtype selects the tolerances:
    a coarser dtype there would loosen all of them.
    """
    _add_fields(m, "target", target_to_dict(e.engine.spec), target_to_dict(e.spec))
    if e.engine.manifest is not None and e.manifest is not None:
        recorded = manifest_to_dict(e.engine.manifest)
        _add_fields(m, "draft", recorded, manifest_to_dict(e.manifest))
    made, built = e.engine.record.engine, e.engine.record.config.engine
    names = ("backend", "dtype")
    wrong = [k for k in names if getattr(made, k) != getattr(built, k)]
    detail = "; ".join(f"{k}: engine {getattr(made, k)}, config {getattr(built, k)}" for k in wrong)
    _add_names(m, "engine", wrong, detail, len(names))
    graph = e.engine.path / "target/model.onnx"
    if graph.exists():
        found = read_activations(onnx.load(graph, load_external_data=False))
        same = found == built.activations
        detail = "" if same else f"activations: config {built.activations}, graph {found}"
        _add_names(m, "graph", [] if same else ["activations"], detail, 1)


def _add_fields(
    m: Measurements, part: str, recorded: Mapping[str, Any], found: Mapping[str, Any]
) -> None:
    names = [k for k in found if k not in _READING]
    wrong = [k for k in names if recorded.get(k) != found[k]]
    detail = "; ".join(
        f"{k}: bundle {recorded.get(k)!r:.60}, checkpoint {found[k]!r:.60}" for k in wrong
    )
    _add_names(m, part, wrong, detail, len(names))


def _add_names(
    m: Measurements, part: str, wrong: Sequence[str], detail: str, compared: int
) -> None:
    place = f"{part}.{wrong[0]}" if wrong else part
    m.add(len(wrong), "", place, None, detail, compared=compared)


def check_files(e: Evidence, m: Measurements) -> None:
    """Compare weights and processor files of the bundle with the checkpoints', byte for byte.

    A file that is the checkpoint's own (a hard link, weights left in place) is not read. Engines
    contain their weights, so there are no files to compare.
    """
    engine = e.engine
    of_draft = e.manifest.tensors if e.manifest else {}
    # tensors of a draft that is part of the target's checkpoint may lie in the target's files
    shared = {f"draft {name}": ref for name, ref in of_draft.items()}
    roles: dict[str, Refs] = {"target": {**e.checkpoint.tensors, **shared}, "draft": of_draft}
    for role, source in engine.record.sources.items():
        root = engine.record.weights_root(engine.path)
        copies = [root / location for location in source.files if location != TABLE_FILE]
        equal = dict(_compared(copies, roles[role]))
        wrong = [name for name, same in equal.items() if not same]
        detail = f"{len(wrong)} tensors are not the checkpoint's" if wrong else ""
        place = f"{role}: {wrong[0]}" if wrong else role
        m.count(tensors=len(equal))
        m.add(len(wrong), "", place, None, detail, compared=len(equal))
    _check_processor_files(m, e.checkpoint.path, engine.path / "processor")


def _check_processor_files(m: Measurements, checkpoint: Path, processor: Path) -> None:
    sides = [(checkpoint / name, processor / name) for name in PROCESSOR_FILES]
    there = [pair for pair in sides if any(file.is_file() for file in pair)]
    names = [ours.name for ours, theirs in there if not _same_file(ours, theirs)]
    detail = f"not the checkpoint's: {', '.join(names)}" if names else ""
    place = f"processor/{names[0]}" if names else "processor"
    m.count(files_of_the_processor=len(there))
    m.add(len(names), "", place, None, detail, compared=len(there))


def _compared(copies: list[Path], refs: Refs) -> Iterator[tuple[str, bool]]:
    """Yield whether each tensor equals its copy in the bundle.

    A file that bundle and checkpoint share is not read. Tensors without a copy (of a converted
    checkpoint) are skipped.
    """
    known = {(path.stat().st_size, header_digest(path)): path for path in copies}
    places: dict[Path, Path | None] = {}
    for name, whole in refs.items():
        for ref in whole.stored:
            if ref.file not in places:
                places[ref.file] = known.get((ref.file.stat().st_size, header_digest(ref.file)))
        copied = [(ref, copy) for ref in whole.stored if (copy := places[ref.file])]
        if copied:
            yield name, all(_same_bytes(ref, copy) for ref, copy in copied)


def _same_bytes(ref: TensorRef, copy: Path) -> bool:
    if copy.samefile(ref.file):
        return True
    return all(a == b for a, b in zip(_bytes(ref.file, ref), _bytes(copy, ref), strict=True))


def _bytes(file: Path, ref: TensorRef) -> Iterator[bytes]:
    for start in range(0, ref.num_bytes, _CHUNK_BYTES):
        with file.open("rb") as stream:
            stream.seek(ref.offset + start)
            part = stream.read(min(_CHUNK_BYTES, ref.num_bytes - start))
        yield part


def _same_file(ours: Path, theirs: Path) -> bool:
    return ours.is_file() and theirs.is_file() and ours.read_bytes() == theirs.read_bytes()


def check_tables(e: Evidence, m: Measurements) -> None:
    """Compare what decoding reads outside the graphs, for every token.

    These are the token tables, the draft's ids, and the tables of its heads.
    """
    engine, drafting = e.engine, e.drafting.reference if e.drafting else None
    size = engine.spec.vocab_size
    _check_table(m, "token table", size, engine.embedding.lookup, e.reference.embed)
    if drafting is None or e.record.target_ids is None:
        return
    if drafting.manifest.embedding == "own":
        _check_table(
            m,
            "draft's token table",
            size,
            engine.draft_embedding.lookup,
            lambda ids: drafting.embed(ids, engine.dtype),
        )
    ids = drafting.target_ids(torch.arange(drafting.manifest.draft_vocab_size))
    ours = e.record.target_ids
    m.add_exact(Compared("", "draft's vocabulary", ours[:, None], ids[:, None]))
    for name in kind_of(drafting.manifest).tables(drafting.manifest):
        table = engine.bundle.read_draft_tensor(name).cpu()
        wanted = read_values(drafting.manifest.tensors[name])
        _check_table(m, name, len(table), table.__getitem__, wanted.__getitem__)


def _check_table(
    m: Measurements,
    name: str,
    size: int,
    ours: Callable[[Tensor], Tensor],
    theirs: Callable[[Tensor], Tensor],
) -> None:
    for start in range(0, size, _ROWS):
        ids = torch.arange(start, min(start + _ROWS, size))
        found = ours(ids).cpu()
        m.add_exact(Compared("", name, found, theirs(ids).cpu().to(found.dtype), start))
