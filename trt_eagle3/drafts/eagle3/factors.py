"""The ambiguous fields of EAGLE-3 drafts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trt_eagle3.checkpoint.manifest import DraftManifest, autoregressive
from trt_eagle3.probe.interpretation import (
    Change,
    Factor,
    choice,
    deepstack,
    embedding,
    image_rows,
    positions,
)
from trt_eagle3.spec import TargetSpec

__all__ = ["FACTORS"]

# bases of EAGLE's own code, of Qwen2-VL and of Qwen3-VL
ROPE_BASES = (10_000.0, 1_000_000.0, 5_000_000.0)


def _aux_layers(manifest: DraftManifest, spec: TargetSpec) -> Iterator[Change]:
    """Vary the aux layers: one layer up and down, and the producers' defaults.

    A shift by one corrects state ids that were read as output ids, and the reverse.
    """
    layers, n = manifest.aux_layers, spec.num_layers
    shifted = [tuple(k + step for k in layers) for step in (-1, 1)]
    for other in (*shifted, (1, n // 2 - 1, n - 4), (2, n // 2, n - 3)):
        if len(other) == len(layers) and min(other) >= 0 and max(other) < n:
            yield {"aux_layers": other}


def _rope_schedule(manifest: DraftManifest, spec: TargetSpec) -> Iterator[Change]:
    for base in dict.fromkeys((*ROPE_BASES, manifest.rope.base, spec.attention.rope.base)):
        yield {"rope.kind": "default", "rope.base": base}


def _rope_layout(manifest: DraftManifest, spec: TargetSpec) -> Iterator[Change]:
    """Use one axis, or three with the draft's own sections, else the target's if they fit."""
    yield {"rope.layout": "1d", "rope.sections": ()}
    positions = {} if autoregressive(manifest).positions == "linear" else {"positions": "3d"}
    sections = manifest.rope.sections or spec.attention.rope.sections
    if sections and 2 * sum(sections) == manifest.head_dim:
        for layout in ("chunked", "interleaved"):
            yield {"rope.layout": layout, "rope.sections": tuple(sections), **positions}


FACTORS: Mapping[str, Factor] = {
    # factors that do not change the draft's graph come first, so that its session is kept for them
    "aux offset": _aux_layers,
    "deepstack": deepstack(_aux_layers),
    "embedding": embedding,
    "image rows": image_rows,
    "positions": positions,
    "position shift": choice("position_shift", 0, 1),
    "rope schedule": _rope_schedule,
    "rope layout": _rope_layout,
    "residual": choice("residual", "hidden", "normed"),
    "feedback": choice("feedback", "pre_norm", "post_norm"),
    "first norm": choice("first_norm", "single", "double"),
}
"""Factor -> its possible values."""
