"""Model properties that the processor needs, in a TargetSpec and in a loaded bundle."""

from __future__ import annotations

from typing import Protocol

__all__ = ["ProcessorSpec", "VisionGeometry"]


class VisionGeometry(Protocol):
    """How a vision tower cuts pixels into patches and merges them into tokens, and token ids."""

    @property
    def patch_size(self) -> int: ...
    @property
    def temporal_patch_size(self) -> int: ...
    @property
    def spatial_merge_size(self) -> int: ...
    @property
    def in_channels(self) -> int: ...
    @property
    def image_token_id(self) -> int: ...
    @property
    def video_token_id(self) -> int: ...
    @property
    def vision_start_token_id(self) -> int | None: ...
    @property
    def vision_end_token_id(self) -> int | None: ...


class ProcessorSpec(Protocol):
    """Token ids and vision geometry of a target; ``vision`` is None if it reads text only."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def vision(self) -> VisionGeometry | None: ...
