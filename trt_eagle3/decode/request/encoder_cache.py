"""EncoderCache: visual embeddings of images and videos, kept for later requests.

The key is the digest of all inputs of the vision tower (``PixelPatches.digest``): pixels after
resizing, grid and normalisation. So options that change pixels change the key.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trt_eagle3.decode.request.prompt import Vision
from trt_eagle3.engine.runtime.buckets import power_of_two
from trt_eagle3.engine.runtime.memory import free_bytes
from trt_eagle3.host_copy import host_buffer, to_device
from trt_eagle3.multimodal.fair_cache import Entry, FairCache
from trt_eagle3.multimodal.media_cache import MediaCacheSizes

__all__ = ["EncoderCache"]

_FREE_SHARE = 8  # at most this part of a GPU's free memory holds embeddings


class EncoderCache:
    """Embeddings on the device; those that must leave it are copied to host memory.

    Only the engine thread uses it; other threads may read the counts.

    Attributes:
        on_device, on_host: the two levels. A value found on the host is copied to the device again.
    """

    def __init__(self, sizes: MediaCacheSizes, device: str) -> None:
        self._device = torch.device(device)
        self._is_measured = device != "cuda"
        self.on_device = FairCache[Vision](sizes.device_bytes)
        self.on_host = FairCache[Vision](sizes.host_bytes)

    @property
    def counts(self) -> dict[str, int]:
        """Hits, misses and bytes, as ``EngineMetrics`` names them."""
        return {
            "embedding_hits": self.on_device.num_hits,
            "embedding_host_hits": self.on_host.num_hits,
            "embedding_misses": self.on_host.num_misses,
            "embedding_bytes": self.on_device.num_bytes,
            "embedding_host_bytes": self.on_host.num_bytes,
        }

    def restart_counts(self) -> None:
        """Reset hits and misses."""
        self.on_device.restart_counts()
        self.on_host.restart_counts()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.on_device or digest in self.on_host

    def get(self, digest: bytes, client: str) -> Vision | None:
        """Return the embeddings of ``digest``, on the device; None if they are not kept."""
        found = self.on_device.get(digest, client)
        if found is not None:
            return found
        on_host = self.on_host.get(digest, client)
        if on_host is None:
            return None
        found = _map(on_host, lambda tensor: to_device(tensor, self._device))
        self.put(digest, found, client)
        return found

    def put(self, digest: bytes, vision: Vision, client: str) -> None:
        """Keep ``vision``. Its tensors must not be changed afterwards."""
        if not self._is_measured:  # after weights, caches and graphs of the start
            self._is_measured = True
            most = (free_bytes() or 0) // _FREE_SHARE
            self.on_device.max_bytes = min(self.on_device.max_bytes, most)
        for entry in self.on_device.put(digest, vision, _num_bytes(vision), client):
            self._move_to_host(entry)

    def clear_device(self) -> bool:
        """Drop all values on the device; returns whether there were any."""
        had_any = self.on_device.num_bytes > 0
        self.on_device.clear()
        return had_any

    def _move_to_host(self, entry: Entry[Vision]) -> None:
        key, client = entry.key, entry.client
        if self.on_host.max_bytes and key not in self.on_host:
            found = _map(entry.value, self._to_host)
            self.on_host.put(key, found, self._host_bytes(found), client)

    def _to_host(self, tensor: Tensor) -> Tensor:
        """Copy ``tensor`` to the host without waiting: copies back are on the same stream."""
        found = host_buffer(tuple(tensor.shape), tensor.dtype, self._device)
        return found.copy_(tensor, non_blocking=True)

    def _host_bytes(self, vision: Vision) -> int:
        """Return what the host needs: torch rounds page-locked memory up to a power of two."""
        if self._device.type != "cuda":
            return _num_bytes(vision)
        return sum(power_of_two(max(t.nbytes, 1)) for t in (vision.embeds, vision.visual_levels))


def _num_bytes(vision: Vision) -> int:
    return vision.embeds.nbytes + vision.visual_levels.nbytes


def _map(vision: Vision, function: Callable[[Tensor], Tensor]) -> Vision:
    return Vision(function(vision.embeds), function(vision.visual_levels))
