"""MediaCacheSizes: how much is kept of images and videos for later requests."""

from __future__ import annotations

from dataclasses import dataclass, fields

from trt_eagle3.errors import UserError

__all__ = ["MEDIA_CACHE", "NO_MEDIA_CACHE", "MediaCacheSizes"]


@dataclass(frozen=True)
class MediaCacheSizes:
    """Bounds of what is kept of images and videos for later requests. 0: keep nothing.

    Answers are the same with and without.

    Attributes:
        device_bytes: visual embeddings on the engine's device; on a GPU at most an eighth of the
            memory that is free at the first image. host_bytes: embeddings that had to leave the
            device, in host memory.
        image_bytes: decoded and resized images, in host memory.
    Raises:
        UserError: a bound is negative or not a whole number.
    """

    device_bytes: int = 512 << 20
    host_bytes: int = 1 << 30
    image_bytes: int = 512 << 20

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise UserError(
                    f"media_cache: {field.name}: expected a number of bytes, or 0 to keep nothing, "
                    f"got {value!r:.40}"
                )

    @property
    def keeps_embeddings(self) -> bool:
        """Whether visual embeddings are kept."""
        return self.device_bytes + self.host_bytes > 0


MEDIA_CACHE = MediaCacheSizes()
NO_MEDIA_CACHE = MediaCacheSizes(0, 0, 0)
