"""MediaPolicy: where images and videos may come from, and how big they may be before anything is
decoded.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LOCAL_MEDIA", "MediaPolicy"]


@dataclass(frozen=True)
class MediaPolicy:
    """What a loader may open.

    Attributes:
        paths: local files and folders, as paths or ``file://`` URLs.
        allowed_hosts: hosts that ``http://`` and ``https://`` URLs are fetched from:
            ``images.example.com``, ``*.example.com`` for all below it, ``host:8080`` for another
            port than the scheme's own. Redirects must stay on such hosts. A host that is named is
            trusted, whatever address it has.
        formats: the image formats that are decoded, by Pillow's names; None: all that Pillow knows.
        max_items: images and videos of one prompt; None: any number.
        max_bytes: of one image or video, encoded; None: any number.
        max_pixels: of one image or frame, also after resizing; None: Pillow's MAX_IMAGE_PIXELS.
        max_video_frames: of a list, or decoded from a video file, used or not; None: any number.
        max_video_pixels: of all frames used of one video, also after resizing; None: any number.
        max_jpeg_scans: of one JPEG; each goes over the whole picture once more, and none needs a
            hundred; None: any number.
        decode_timeout_s: seconds that decoding and resizing one image or frame may take; None: any
            number.
        video_timeout_s: the same of one video file.
        fetch_timeout_s: seconds that one fetch may take in all, redirects included.
    """

    paths: bool
    allowed_hosts: tuple[str, ...] = ()
    formats: tuple[str, ...] | None = None
    max_items: int | None = None
    max_bytes: int | None = None
    max_pixels: int | None = None
    max_video_frames: int | None = None
    max_video_pixels: int | None = None
    max_jpeg_scans: int | None = None
    decode_timeout_s: float | None = None
    video_timeout_s: float | None = None
    fetch_timeout_s: float = 10.0


LOCAL_MEDIA = MediaPolicy(paths=True)
"""For prompts of the machine's own user: any file, nothing remote."""
