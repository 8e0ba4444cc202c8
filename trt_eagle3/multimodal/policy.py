"""MediaPolicy: permitted sources and sizes of images and videos, checked before decoding."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LOCAL_MEDIA", "MediaPolicy"]


@dataclass(frozen=True)
class MediaPolicy:
    """Sources, formats and sizes that a loader accepts.

    The defaults suit prompts of other people. They equal those of ``serve``: no files, no hosts.

    Attributes:
        paths: whether local files and folders are read, as paths or ``file://`` URLs.
        allowed_hosts: hosts that ``http://`` and ``https://`` URLs are fetched from:
            ``images.example.com``, ``*.example.com`` for all its subdomains, ``host:8080`` for a
            port that is not the scheme's default. Redirects must stay on such hosts. A listed host
            is trusted, whatever its address.
        formats: Pillow's names of the image formats that are decoded; None: all that Pillow reads.
        max_items: images and videos of one prompt; None: no limit.
        max_bytes: encoded bytes of one image or video; None: no limit.
        max_pixels: pixels of one image or frame, also after resizing; None: Pillow's
            MAX_IMAGE_PIXELS.
        max_video_frames: frames of a list, or frames decoded from a video file, used or not; None:
            no limit.
        max_video_pixels: pixels of all used frames of one video, also after resizing; None: no
            limit.
        max_jpeg_scans: scans of one JPEG. Each scan decodes the whole image again, and no image
            needs a hundred. None: no limit.
        decode_timeout_s: seconds to decode and resize one image or frame; None: no limit.
        video_timeout_s: seconds to decode one video file; None: no limit.
        fetch_timeout_s: seconds for one fetch, including redirects.
    """

    paths: bool = False
    allowed_hosts: tuple[str, ...] = ()
    # Pillow decodes these in its own process. For PostScript, it would start Ghostscript.
    formats: tuple[str, ...] | None = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
    max_items: int | None = 16
    max_bytes: int | None = 20 << 20
    max_pixels: int | None = 1 << 25  # an 8K frame
    max_video_frames: int | None = 7200  # two minutes at 60 per second
    max_video_pixels: int | None = 1 << 31  # 768 frames of 1080p
    max_jpeg_scans: int | None = 100  # encoders write 1 to 20
    decode_timeout_s: float | None = 10.0
    video_timeout_s: float | None = 120.0
    fetch_timeout_s: float = 10.0


LOCAL_MEDIA = MediaPolicy(
    paths=True,
    formats=None,
    max_items=None,
    max_bytes=None,
    max_pixels=None,
    max_video_frames=None,
    max_video_pixels=None,
    max_jpeg_scans=None,
    decode_timeout_s=None,
    video_timeout_s=None,
)
"""For prompts of the local user: any file of any size, no remote source."""
