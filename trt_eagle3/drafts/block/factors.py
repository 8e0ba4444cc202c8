"""The ambiguous fields of block drafts.

A rotated part of a head is none of them: all trainers rotate whole heads, whatever their files say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.drafts.block.manifest import BlockManifest
from trt_eagle3.probe.interpretation import Change, Factor, deepstack, embedding
from trt_eagle3.spec import TargetSpec

__all__ = ["FACTORS"]

# bases of transformers' default, of Qwen3, of Qwen3-VL and of Qwen3.5
_ROPE_BASES = (10_000.0, 1_000_000.0, 5_000_000.0, 10_000_000.0)


def _block(manifest: DraftManifest) -> BlockManifest:
    assert isinstance(manifest, BlockManifest), type(manifest)
    return manifest


def _aux_layers(manifest: DraftManifest, spec: TargetSpec) -> Iterator[Change]:
    """Vary the aux layers by one: states read as outputs, and the reverse."""
    for step in (-1, 1):
        shifted = tuple(k + step for k in manifest.aux_layers)
        if shifted[0] >= 0 and shifted[-1] < spec.num_layers:
            yield {"aux_layers": shifted}


def _shift(_manifest: DraftManifest, _spec: TargetSpec) -> Iterator[Change]:
    """Let rows predict their own token, or the next."""
    yield {"shift": "own", "anchor_row": False}
    yield {"shift": "next", "anchor_row": True}


def _causal(manifest: DraftManifest, _spec: TargetSpec) -> Iterator[Change]:
    """Make no layer causal, those with a window, or all."""
    layers = _block(manifest).layers
    for full, sliding in ((False, False), (False, True), (True, True)):
        yield {"layers": tuple(replace(x, causal=sliding if x.window else full) for x in layers)}


def _window_rule(manifest: DraftManifest, _spec: TargetSpec) -> Iterator[Change]:
    """Count windows from each row, or from the anchor."""
    if any(layer.window for layer in _block(manifest).layers):
        yield {"window_rule": "row"}
        yield {"window_rule": "anchor"}


def _rope_base(manifest: DraftManifest, spec: TargetSpec) -> Iterator[Change]:
    own, target = manifest.rope.base, spec.attention.rope.base
    for base in dict.fromkeys((*_ROPE_BASES, own, target)):
        yield {"rope.kind": "default", "rope.base": base}


FACTORS: Mapping[str, Factor] = {
    "aux offset": _aux_layers,
    "deepstack": deepstack(_aux_layers),
    "embedding": embedding,
    "shift": _shift,
    "causal": _causal,
    "window rule": _window_rule,
    "rope base": _rope_base,
}
"""Factor -> its possible values."""
