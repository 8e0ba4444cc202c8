"""Gates on what prompts may never reach: every weight on disk, every row of the tables, the
tokenizer's files.

An answer visits few tokens. A rare one whose embedding is wrong, or a tokenizer of another
revision, changes nothing until somebody asks for it; comparing all of it is cheap. Shapes: V vocab,
Vd draft vocab, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.checkpoint.target import TargetSpec
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.engine.bundle import header_digest
from trt_eagle3.engine.weight_locations import TABLE_FILE
from trt_eagle3.multimodal.processor import PROCESSOR_FILES
from trt_eagle3.parity.board import Board
from trt_eagle3.parity.drafting import DraftReference
from trt_eagle3.parity.record import RecordingEngine
from trt_eagle3.parity.target import TargetReference

__all__ = ["check_files", "check_tables"]

_CHUNK_BYTES = 1 << 24
_ROWS = 8192  # of a table at once: 8192 x 4096 in float32 are 134 MB

Refs = Mapping[str, TensorRef]


def check_files(
    board: Board, engine: RecordingEngine, spec: TargetSpec, manifest: DraftManifest | None
) -> None:
    """Weights and processor files of the bundle against the checkpoints', byte for byte.

    A file that is the checkpoint's own (a hard link, weights left in place) is not read. Engines
    hold their weights inside: of those there are no files.
    """
    roles: dict[str, Refs] = {"target": spec.tensors, "draft": manifest.tensors if manifest else {}}
    for role, source in engine.record.sources.items():
        root = engine.record.weights_root(engine.path)
        copies = [root / location for location in source.files if location != TABLE_FILE]
        if copies:
            wrong = list(_differing(copies, roles[role]))
            detail = f"{len(wrong)} tensors are not the checkpoint's" if wrong else ""
            board.add(
                "bundle.files",
                len(wrong),
                "",
                f"{role}: {wrong[0]}" if wrong else role,
                None,
                detail,
            )
    names = [
        name
        for name in PROCESSOR_FILES
        if not _same_file(spec.path / name, engine.path / "processor" / name)
    ]
    detail = f"not the checkpoint's: {', '.join(names)}" if names else ""
    board.add(
        "bundle.files",
        len(names),
        "",
        f"processor/{names[0]}" if names else "processor",
        None,
        detail,
    )


def _differing(copies: list[Path], refs: Refs) -> Iterator[str]:
    """Names of tensors whose bytes are others in the copy; of none that are in no copy (a
    converted checkpoint's).
    """
    known = {(path.stat().st_size, header_digest(path)): path for path in copies}
    places: dict[Path, Path | None] = {}
    for name, ref in refs.items():
        if ref.file not in places:
            copy = known.get((ref.file.stat().st_size, header_digest(ref.file)))
            places[ref.file] = None if copy is None or copy.samefile(ref.file) else copy
        copy = places[ref.file]
        if copy and any(
            a != b for a, b in zip(_bytes(ref.file, ref), _bytes(copy, ref), strict=True)
        ):
            yield name


def _bytes(file: Path, ref: TensorRef) -> Iterator[bytes]:
    with file.open("rb") as stream:
        stream.seek(ref.offset)
        for start in range(0, ref.num_bytes, _CHUNK_BYTES):
            yield stream.read(min(_CHUNK_BYTES, ref.num_bytes - start))


def _same_file(ours: Path, theirs: Path) -> bool:
    there = [path.is_file() for path in (ours, theirs)]
    return not any(there) or (all(there) and ours.read_bytes() == theirs.read_bytes())


def check_tables(
    board: Board,
    engine: RecordingEngine,
    reference: TargetReference,
    drafting: DraftReference | None,
) -> None:
    """What decoding reads outside the graphs, for every token there is: the token tables, and
    the draft's ids.
    """
    size = engine.spec.text.vocab_size
    _check_table(board, "token table", size, engine.embedding.lookup, reference.embed)
    if drafting is None or engine.drafting is None:
        return
    if drafting.manifest.embedding == "own":
        _check_table(
            board,
            "draft's token table",
            size,
            engine.draft_embedding.lookup,
            lambda ids: drafting.embed(ids, engine.dtype),
        )
    ids = torch.arange(drafting.manifest.draft_vocab_size)
    ours = engine.drafting.proposer.runner.target_ids(ids.to(engine.device)).cpu()
    board.add_exact(
        "bundle.tables", ours[:, None], drafting.target_ids(ids)[:, None], "", "draft's vocabulary"
    )


def _check_table(
    board: Board,
    name: str,
    size: int,
    ours: Callable[[Tensor], Tensor],
    theirs: Callable[[Tensor], Tensor],
) -> None:
    for start in range(0, size, _ROWS):
        ids = torch.arange(start, min(start + _ROWS, size))
        found = ours(ids).cpu()
        board.add_exact("bundle.tables", found, theirs(ids).cpu().to(found.dtype), "", name, start)
