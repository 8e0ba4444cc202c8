"""Encoded examples as one padded batch, and the endless deterministic stream of training batches.

# Shapes: B examples, L padded tokens, P patches in all, N temporal patches, M merged patches in
all, A answer rows
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from prompt import MERGE, PATCH, Encoded, encode, prompt_text
from tasks import Kind, examples
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["TRAIN_MIX", "Batch", "TrainingBatches", "collate"]

TRAIN_MIX: tuple[Kind, ...] = (
    "text",
    "text",
    "image",
    "image",
    "image",
    "two_images",
    "two_images",
    *["frames"] * 5,
)
FPS_CHOICES = (2.0, 2.0, 1.0, 4.0, 8.0, 24.0, 30.0)


@dataclass
class Batch:
    """Right-padded examples.

    Attributes:
        ids: int64 [B, L].
        positions: int64 [3, B, L].
        prompt_len, length: int64 [B].
        patches: uint8 [P, 1536], each flattened (channel, frame, y, x), merge blocks contiguous.
        grid: int64 [P, 4]: row, column, rows, columns of each patch in its temporal patch.
        slot: int64 [P]: index into the padded [N * slots] patches, slots = the largest temporal
            patch.
        counts: int64 [N]: patches in each temporal patch.
        visual_rows: int64 [M]: index into [B * L] of each merged patch's token.
    """

    ids: Tensor
    positions: Tensor
    prompt_len: Tensor
    length: Tensor
    patches: Tensor
    grid: Tensor
    slot: Tensor
    counts: Tensor
    visual_rows: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(
            **{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)}
        )

    def pin_memory(self) -> Batch:
        return Batch(**{f.name: getattr(self, f.name).pin_memory() for f in fields(self)})

    def trimmed(self, width: int) -> Batch:
        """The first ``width`` columns; they must hold every visual token."""
        full = self.ids.shape[1]
        rows = self.visual_rows // full * width + self.visual_rows % full
        return replace(
            self, ids=self.ids[:, :width], positions=self.positions[:, :, :width], visual_rows=rows
        )


def _patchify(pixels: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """uint8 [2, height, width, 3] -> patches [n, 1536] and grid [n, 4], in merge-block order."""
    rows, columns = pixels.shape[1] // PATCH, pixels.shape[2] // PATCH
    blocks = pixels.reshape(2, rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3)
    patches = blocks.transpose(1, 4, 2, 5, 7, 0, 3, 6).reshape(rows * columns, -1)
    index = (
        np.arange(rows * columns)
        .reshape(rows // MERGE, MERGE, columns // MERGE, MERGE)
        .transpose(0, 2, 1, 3)
        .ravel()
    )
    grid = np.stack(
        [index // columns, index % columns, 0 * index + rows, 0 * index + columns], axis=1
    )
    return patches, grid


def collate(
    encoded: list[Encoded], vision_ids: tuple[int, ...], pad_id: int, extra: int = 0
) -> Batch:
    """Pad to the longest example plus ``extra`` free positions (for generation)."""
    length = np.array([len(e.ids) for e in encoded])
    width = int(length.max()) + extra
    ids = np.full((len(encoded), width), pad_id, dtype=np.int64)
    positions = np.zeros((3, len(encoded), width), dtype=np.int64)
    for row, e in enumerate(encoded):
        ids[row, : length[row]] = e.ids
        positions[:, row, : length[row]] = e.positions
        positions[:, row, length[row] :] = e.positions[:, -1:] + 1 + np.arange(width - length[row])
    pieces = [_patchify(pixels) for e in encoded for pixels in e.patches]
    counts = np.array([len(p) for p, _ in pieces], dtype=np.int64)
    slots = int(counts.max(initial=0))
    slot = [np.arange(count) + slots * n for n, count in enumerate(counts)]
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        torch.tensor([e.prompt_len for e in encoded]),
        torch.from_numpy(length),
        torch.from_numpy(np.concatenate([p for p, _ in pieces] or [np.zeros((0, 1536), np.uint8)])),
        torch.from_numpy(np.concatenate([g for _, g in pieces] or [np.zeros((0, 4), np.int64)])),
        torch.from_numpy(np.concatenate(slot or [np.zeros(0, np.int64)])),
        torch.from_numpy(counts),
        torch.from_numpy(np.flatnonzero(np.isin(ids.ravel(), vision_ids))),
    )


class TrainingBatches(Dataset[Batch]):
    """Batch i is a function of (seed, i) alone, so the order of the workers does not matter."""

    def __init__(
        self,
        tokenizer_json: str,
        seed: int,
        batch_size: int,
        num_batches: int,
        kinds: tuple[Kind, ...] = TRAIN_MIX,
    ) -> None:
        self.tokenizer_json, self.seed, self.batch_size, self.num_batches = (
            tokenizer_json,
            seed,
            batch_size,
            num_batches,
        )
        self.kinds = kinds
        self.tokenizer: Tokenizer | None = None

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> Batch:
        if self.tokenizer is None:  # one per worker process
            self.tokenizer = Tokenizer.from_str(self.tokenizer_json)
        tokenizer, rng = self.tokenizer, random.Random(f"{self.seed}/{index}")
        encoded = []
        for example in examples(
            "train", self.seed * 10_000_019 + index, self.batch_size, self.kinds
        ):
            system = "You are a helpful assistant." if rng.random() < 0.15 else None
            prompt = prompt_text(
                example, rng.choice(FPS_CHOICES), wrapped=rng.random() < 0.5, system=system
            )
            encoded.append(encode(tokenizer, example, prompt))
        vision_ids = (
            tokenizer.token_to_id("<|image_pad|>"),
            tokenizer.token_to_id("<|video_pad|>"),
        )
        return collate(encoded, vision_ids, tokenizer.token_to_id("<|endoftext|>"))
