"""VisionEncoder: encode the images and videos of a prompt to visual embeddings, or find kept ones.

Also the runner of the vision graph, and the sizes that its runs are padded to.

Shapes: n patches, N visual tokens, H target hidden, L deepstack levels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from trt_eagle3.decode.request.encoder_cache import EncoderCache
from trt_eagle3.decode.request.prompt import Prompt, Vision
from trt_eagle3.engine.runtime.buckets import PATCHES
from trt_eagle3.engine.runtime.memory import request_memory
from trt_eagle3.engine.runtime.session import Session
from trt_eagle3.families.registry import tower_of
from trt_eagle3.multimodal import PixelPatches, normalise
from trt_eagle3.spec import TargetSpec

__all__ = ["PatchBuckets", "VisionEncoder", "VisionRunner"]


@dataclass(frozen=True)
class PatchBuckets:
    """Padded patch counts of the vision graph, so that images of similar size share a capture.

    Attributes:
        limit: most patches after padding. unit: padding is a multiple of it.
        pad: pads the graph's other inputs to a patch count
            (``families.family.FamilyVision.padded``).
    """

    limit: int
    unit: int
    pad: Callable[[Mapping[str, Tensor], int], dict[str, Tensor]]

    @property
    def sizes(self) -> list[int]:
        """Patch counts that are captured, the largest first."""
        counts = range(self.unit, min(self.limit, PATCHES.limit) + 1, self.unit)
        return sorted({self.size_of(count) for count in counts}, reverse=True)

    def size_of(self, count: int) -> int:
        """Return the padded patch count of ``count`` patches."""
        return count + self._added(count)

    def padded(self, patches: Tensor, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the graph inputs, padded to the bucket of ``patches``."""
        count, added = len(patches), self._added(len(patches))
        # padding by 0 copies
        filled = functional.pad(patches, (0, 0, 0, added)) if added else patches
        return {"patches": filled, **self.pad(rows, count + added)}

    def _added(self, count: int) -> int:
        padding = min(PATCHES.size_of(count), self.limit) - count
        return max(0, padding // self.unit * self.unit)


class VisionRunner:
    """The vision graph."""

    def __init__(
        self, session: Session, *, merge_size: int, buckets: PatchBuckets | None = None
    ) -> None:
        """Create a runner of ``session``.

        Args:
            merge_size: patches along each side of a visual token.
            buckets: sizes that patches are padded to, so that CUDA graphs are reused; None: no
                padding.
        """
        self._session = session
        self._merged = merge_size**2
        self._buckets = buckets

    def forward(self, patches: Tensor, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Visual embeddings [N, H] and deepstack levels [L, N, H] of ``patches [n, patch_dim]``,
        the caller's own.
        """
        count = len(patches) // self._merged
        inputs = {"patches": patches, **rows}
        if self._buckets is not None:
            inputs = self._buckets.padded(patches, rows)
        outputs = self._session.run(inputs)
        visual_levels = outputs.get("deepstack")
        # copies: a prompt keeps them until its prefill, and the graph may run again before that
        embeds = outputs["visual_embeds"][:count].clone()
        return embeds, None if visual_levels is None else visual_levels[:, :count].clone()


class VisionEncoder:
    """Runs a bundle's vision tower, which is opened at the first image.

    Each image or video runs alone. So its embeddings do not depend on the others of its prompt, and
    kept ones equal those of another run.
    """

    def __init__(
        self,
        spec: TargetSpec,
        dtype: torch.dtype,
        device: str,
        tower: Callable[[], VisionRunner],
        cache: EncoderCache | None = None,
    ) -> None:
        """Create an encoder.

        ``tower``: called for every image that is encoded. ``cache``: keeps embeddings of images
        whose prompts have digests; None: keep none.
        """
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._tower = tower
        self._cache = cache

    @property
    def counts(self) -> dict[str, int]:
        """Hits, misses and bytes of the cache; empty without one."""
        return {} if self._cache is None else self._cache.counts

    def restart_counts(self) -> None:
        """Reset hits and misses of the cache."""
        if self._cache is not None:
            self._cache.restart_counts()

    def keeps(self, prompt: Prompt) -> bool:
        """Return whether ``encode`` would run no tower."""
        cache = self._cache
        if cache is None or not prompt.media:
            return not prompt.visuals
        return all(digest in cache for digest, _ in prompt.media)

    def encode(self, prompt: Prompt) -> Vision:
        """Return visual embeddings and deepstack levels of ``prompt``, on the bundle's device.

        Raises:
            DeviceMemoryError: they need more memory than is free.
        """
        if not prompt.visuals:
            return self._nothing()
        what = f"prompt: the images of {int(prompt.visual_rows.sum())} visual tokens"
        with request_memory(what, "Send fewer or smaller images, or rebuild with smaller limits."):
            try:
                return self._encode(prompt)
            except torch.OutOfMemoryError:
                if self._cache is None or not self._cache.clear_device():
                    raise
            torch.cuda.empty_cache()
            return self._encode(prompt)

    def _encode(self, prompt: Prompt) -> Vision:
        digests = [digest for digest, _ in prompt.media] or [b""] * len(prompt.visuals)
        pairs = zip(prompt.visuals, digests, strict=True)
        return _joined([self._one(visual, digest, prompt.client) for visual, digest in pairs])

    def _one(self, visual: PixelPatches, digest: bytes, client: str) -> Vision:
        """Return the embeddings of one image or video; an empty ``digest``: it is not kept."""
        if self._cache is None or not digest:
            return self._run(visual)
        found = self._cache.get(digest, client)
        if found is None:
            found = self._run(visual)
            self._cache.put(digest, found, client)
        return found

    def _run(self, visual: PixelPatches) -> Vision:
        grids = torch.tensor([visual.grid], dtype=torch.int64)
        rows = tower_of(self._spec).inputs(self._spec.require_vision(), grids)
        patches = normalise([visual], self._dtype, self._device)
        embeds, levels = self._tower().forward(patches, rows)
        return Vision(embeds, embeds.new_zeros(0, *embeds.shape) if levels is None else levels)

    def _nothing(self) -> Vision:
        none = torch.zeros(0, self._spec.hidden_size, dtype=self._dtype, device=self._device)
        return Vision(none, none.expand(self._spec.num_visual_levels, -1, -1))


def _joined(parts: Sequence[Vision]) -> Vision:
    if len(parts) == 1:
        return parts[0]
    embeds = torch.cat([part.embeds for part in parts])
    return Vision(embeds, torch.cat([part.visual_levels for part in parts], dim=1))
