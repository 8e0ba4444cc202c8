"""P-EAGLE's one forward against what its producer's code computed.

``peagle.json``: the training forward of speculators 0.9.0 (PyPI), ``models/peagle/core.py``, in
float32 on a CPU, over the committed rows and the mask rows of one chain. It holds numbers alone;
``tests/drafts/block/golden.py`` draws the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.drafts.block.golden import drawn, vocabulary
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.drafts.eagle3.reference import Eagle3Reference

RECORD: dict[str, Any] = json.loads(Path(__file__).with_name("peagle.json").read_text("utf-8"))
TOLERANCE = 3e-5
"""Absolute: the producer ran in float32, and the file holds six digits. 7e-6 is seen."""
NUM_ROWS, NUM_MASKS = len(RECORD["ids"]), RECORD["num_drafts"] - 1

Rows = tuple[Tensor, Tensor, Tensor]
"""Token ids [T], aux states [T, k * Ht] and positions [T]."""


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Eagle3Reference:
    """The draft, read from a checkpoint in the producer's layout, with its embedding table."""
    folder = tmp_path_factory.mktemp("peagle")
    tensors = {name: drawn(name, shape) for name, shape in RECORD["tensors"].items()}
    saved = tensors | vocabulary(RECORD["d2t"], tensors["embed_tokens.weight"].shape[0])
    save_file(saved, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(RECORD["config"]), encoding="utf-8")
    read = Eagle3Reference.load(read_draft(folder, None))
    table = tensors["embed_tokens.weight"]
    return Eagle3Reference(read.manifest, {**read.weights, "embed_tokens.weight": table})


def rows(draft: Eagle3Reference) -> Rows:
    """The committed rows, then the mask rows."""
    assert draft.manifest.parallel is not None
    masks = [draft.manifest.parallel.mask_token_id] * NUM_MASKS
    hidden = draft.weights["mask_hidden"][0].expand(NUM_MASKS, -1)
    aux = drawn("aux", (64, hidden.shape[1]))[:NUM_ROWS]
    ids = torch.tensor([*RECORD["ids"], *masks])
    return ids, torch.cat([aux.double(), hidden]), torch.arange(NUM_ROWS + NUM_MASKS)


def error(draft: Eagle3Reference, found: Rows) -> float:
    """The largest difference of logits from the producer's."""
    ids, aux, positions = found
    embeds = draft.weights["embed_tokens.weight"][ids]
    mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    logits, _ = draft.forward(embeds, draft.fuse(aux), positions.expand(3, -1), mask)
    return float((logits - torch.tensor(RECORD["logits"])).abs().max())


def test_reader_and_reference_equal_the_producers_code(draft: Eagle3Reference) -> None:
    assert draft.manifest.parallel is not None
    assert draft.manifest.parallel.num_drafts == RECORD["num_drafts"]
    assert error(draft, rows(draft)) < TOLERANCE


def _last_features(found: Rows) -> Rows:
    ids, aux, positions = found
    last = aux[NUM_ROWS - 1].expand(NUM_MASKS, -1)
    return ids, torch.cat([aux[:NUM_ROWS], last]), positions


FAULTS: dict[str, Callable[[Rows], Rows]] = {
    "mask rows take the last row's features": _last_features,
    "mask rows take another token": lambda r: (r[0] - (r[0] == r[0][-1]).long(), r[1], r[2]),
    "mask rows stand at the last position": lambda r: (r[0], r[1], r[2].clamp(max=NUM_ROWS - 1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_differs_from_the_producers_code(fault: str, draft: Eagle3Reference) -> None:
    assert error(draft, FAULTS[fault](rows(draft))) > 100 * TOLERANCE
