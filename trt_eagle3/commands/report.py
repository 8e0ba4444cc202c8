"""Format the commands' output: values for JSON, lines and tables for a terminal."""

from __future__ import annotations

import dataclasses
import shlex
from itertools import groupby
from typing import TYPE_CHECKING, Any

from trt_eagle3.checkpoint.manifest import DraftManifest, manifest_to_dict
from trt_eagle3.checkpoint.quantised.weight import Quantisation
from trt_eagle3.checkpoint.target import TargetCheckpoint, target_to_dict
from trt_eagle3.drafts.registry import kind_of
from trt_eagle3.engine.bundle.read import BUILD_SCRIPT
from trt_eagle3.engine.runtime.memory import kv_bytes_per_token, state_bytes
from trt_eagle3.errors import clip
from trt_eagle3.families.registry import family_of
from trt_eagle3.io.terminal_text import TextTable
from trt_eagle3.multimodal.end_tokens import end_token_warnings
from trt_eagle3.spec import RopeSpec, SparseMoe, TargetSpec, VisionSpec

if TYPE_CHECKING:  # these import torch, which --help should not wait for
    from trt_eagle3.decode.request.request import Generation
    from trt_eagle3.engine.builder.job import Engines
    from trt_eagle3.engine.runtime.embedding import TableDifference
    from trt_eagle3.pipeline import BuildReport

__all__ = [
    "build",
    "build_lines",
    "generation_line",
    "inspection",
    "inspection_lines",
]

_EXCLUDED_SHOWN = 6
_UNRELATED = (
    "embedding: the draft's own table differs from the target's: untrained, or trained from random "
    "values. Run probe to compare them. To use the target's: draft.overrides.embedding: target"
)


def inspection(spec: TargetCheckpoint, manifest: DraftManifest | None) -> dict[str, Any]:
    """Return the output of ``inspect --json``."""
    difference = _embedding_difference(spec, manifest)
    return {
        "target": {
            "path": str(spec.path),
            **target_to_dict(spec),
            "quantisation": spec.quantisation.as_dict() if spec.quantisation else None,
            "warnings": list(end_token_warnings(spec.path, spec.eos_token_ids)),
        },
        "draft": None
        if manifest is None
        else {
            "path": str(manifest.path),
            **manifest_to_dict(manifest),
            "embedding_difference": dataclasses.asdict(difference) if difference else None,
        },
    }


def inspection_lines(
    spec: TargetCheckpoint, manifest: DraftManifest | None
) -> list[str | TextTable]:
    """Describe the checkpoints in lines and a table.

    The target and the draft have a line of geometry each. A table has the draft's interpretation
    with its sources. Warnings come last.
    """
    parts: list[str | TextTable] = [_target_line(spec)]
    parts += [_quantisation_line(spec.quantisation)] if spec.quantisation else []
    warnings = list(end_token_warnings(spec.path, spec.eos_token_ids))
    warnings += manifest.warnings if manifest else ()
    if manifest:
        parts += [_draft_line(manifest), _meaning_table(manifest)]
        if difference := _embedding_difference(spec, manifest):
            parts.append(_difference_line(difference))
            warnings += [_UNRELATED] if difference.is_unrelated else []
    elif spec.mtp:
        parts.append("  has an MTP head: to draft with it, draft.checkpoint: mtp")
    parts.append(_kv_line(spec, manifest))
    return parts + [f"warning: {warning}" for warning in warnings]


def _embedding_difference(
    spec: TargetCheckpoint, manifest: DraftManifest | None
) -> TableDifference | None:
    """Compare a draft's own token table with the target's; None if it has none of that shape."""
    if manifest is None or manifest.embedding == "target":
        return None
    from trt_eagle3.engine.runtime.embedding import table_difference

    name = "embed_tokens.weight"
    return table_difference(manifest.tensors[name], spec.tensors[name])


def _difference_line(found: TableDifference) -> str:
    return (
        f"  its own embedding against the target's, {found.num_rows:,} rows: relative difference "
        f"{found.relative:.3f}, mean cosine {found.cosine:.3f}"
    )


def _target_line(spec: TargetCheckpoint) -> str:
    attention = spec.attention
    line = (
        f"target {spec.path}: {family_of(spec).title}, {spec.num_layers} layers, hidden "
        f"{spec.hidden_size}, {attention.num_heads}/{attention.num_kv_heads} heads of "
        f"{attention.head_dim}, vocabulary {spec.vocab_size}, "
        f"{'tied' if spec.tied_head else 'own'} head, rope {_rope(attention.rope)}; "
    )
    return line + _linear_text(spec) + _experts_text(spec) + _vision_text(spec.vision)


def _linear_text(spec: TargetSpec) -> str:
    """Describe the layers of linear attention; empty without any."""
    layers = spec.recurrent_layers
    if not layers:
        return ""
    linear = layers[0][1]
    return (
        f"{len(layers)} layers of linear attention, {linear.num_k_heads}/{linear.num_v_heads} "
        f"heads of {linear.key_dim}/{linear.value_dim}, convolution of {linear.conv_width}; "
    )


def _experts_text(spec: TargetSpec) -> str:
    """Describe the expert layers; empty without any."""
    sparse = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, SparseMoe)]
    if not sparse:
        return ""
    moe = sparse[0]
    weights = "renormalised" if moe.renormalise else "not renormalised"
    shared = f", and a shared one of {moe.shared_expert_width}" if moe.shared_expert_width else ""
    return (
        f"{len(sparse)} layers of {moe.num_experts} experts of {moe.expert_width}, {moe.top_k} per "
        f"token, {weights}{shared}; "
    )


def _kv_line(spec: TargetCheckpoint, manifest: DraftManifest | None) -> str:
    token = kv_bytes_per_token(spec, manifest, "bfloat16")
    fp8 = kv_bytes_per_token(spec, manifest, "bfloat16", "fp8")
    line = (
        f"KV cache: {token:,} bytes per token in 16 bits; a sequence of 4,096 tokens takes "
        f"{4096 * token / 1e9:.2f} GB, with kv_dtype: fp8 {4096 * fp8 / 1e9:.2f} GB"
    )
    if not spec.recurrent_layers:
        return line
    state = state_bytes(spec, "bfloat16")
    return f"{line}; recurrent states: {state:,} bytes per entry, two entries per sequence"


def _vision_text(vision: VisionSpec | None) -> str:
    if vision is None:
        return "text only"
    blocks = f"vision {vision.depth} blocks of {vision.hidden_size}"
    levels = list(vision.level_blocks)
    return f"{blocks}, visual levels after {levels}" if levels else f"{blocks}, no visual levels"


def _quantisation_line(found: Quantisation) -> str:
    """Describe format, groups, exclusions, and the file that defines them."""
    weights = ", ".join(f"{count} weights {title}" for title, count in found.weights.items())
    excluded = ", ".join(found.excluded[:_EXCLUDED_SHOWN]) or "nothing by name"
    more = len(found.excluded) - _EXCLUDED_SHOWN
    parts = [
        f"  quantised by {found.provenance}: {weights}",
        f"activations {found.activations}",
        f"excluded {clip(excluded)}{f' and {more} more' if more > 0 else ''}",
    ]
    if found.kv_cache or found.kv_scales:
        told = found.kv_cache or "not named"
        use = "used by engine.kv_dtype: fp8"
        parts.append(f"KV cache {told}, {len(found.kv_scales)} scales ({use})")
    return "; ".join(parts)


def _draft_line(manifest: DraftManifest) -> str:
    m = manifest
    return (
        f"draft {m.path}: {kind_of(m).title} by {m.producer}, {m.num_layers} "
        f"layer{'s' if m.num_layers > 1 else ''}, hidden {m.hidden_size}, "
        f"{m.num_heads}/{m.num_kv_heads} heads of {m.head_dim}, vocabulary {m.draft_vocab_size} of "
        f"{m.vocab_size}"
    )


_GEOMETRY = {
    "num_layers",
    "hidden_size",
    "target_hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "layer",
}
_SIZES = {"vocab_size", "draft_vocab_size", "max_position_embeddings"}
_NOT_MEANING = {*_GEOMETRY, *_SIZES, "path", "tensors", "sources", "warnings"}


def _meaning_table(manifest: DraftManifest) -> TextTable:
    """List every field of the draft's interpretation, with its source."""
    table = TextTable("field", "value", "from")
    for name, value in vars(manifest).items():
        if name not in _NOT_MEANING:
            source = manifest.sources.get(name)
            shown = _rope(value) if isinstance(value, RopeSpec) else value
            table.add_row(name, _plain(shown), f"{source.kind}: {source.detail}" if source else "")
    return table


def _rope(rope: RopeSpec) -> str:
    sections = f" {list(rope.sections)}" if rope.sections else ""
    kind = "" if rope.kind == "default" else f", {rope.kind}"
    return f"{rope.layout}{sections}, base {rope.base:g}{kind}"


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, tuple) and any(dataclasses.is_dataclass(part) for part in value):
        return ", ".join(f"{len(list(run))} x {part}" for part, run in groupby(value))
    return str(list(value)) if isinstance(value, tuple) else str(value)


def build(result: BuildReport) -> dict[str, Any]:
    """Return the output of ``build --json``.

    ``engines`` is for TensorRT only; its ``script`` remains to be run, unless it is None.
    """
    printed = {
        "bundle": str(result.path),
        "num_bytes": result.num_bytes,
        "seconds": dict(result.seconds),
        "weights": list(result.placed),
        "memory_bytes": dataclasses.asdict(result.memory),
        "replaced": result.replaced,
        "calibrated_on": result.calibrated_on or None,
        "warnings": list(result.warnings),
    }
    if result.engines is None:
        return printed
    script = str(result.path / BUILD_SCRIPT) if result.engines.missing else None
    return {**printed, "engines": {**dataclasses.asdict(result.engines), "script": script}}


def build_lines(result: BuildReport) -> list[str]:
    """Return lines on the bundle: location, size, time and the next step."""
    stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in result.seconds.items())
    placed = (
        f" (weights by {' and '.join(result.placed) or 'reference'})"
        if result.engines is None
        else ""
    )
    replaced = ", in place of the bundle that was there" if result.replaced else ""
    return [
        f"built {result.path}: {result.num_bytes / 1e6:.1f} MB{placed}{replaced}",
        f"  {stages}",
        *([f"  calibrated on {result.calibrated_on}"] if result.calibrated_on else ()),
        f"  memory of the largest permitted load: {result.memory}",
        *(_engine_lines(result.engines) if result.engines else ()),
        *(f"warning: {warning}" for warning in result.warnings),
        _next_line(result),
    ]


def _engine_lines(engines: Engines) -> list[str]:
    return [
        f"  {name}: engine of {built.num_bytes / 1e6:.1f} MB, {built.num_layers} layers, "
        f"{built.num_plugins} of them our plugins, {built.device_bytes / 1e6:.0f} MB of "
        f"activations, built in {built.seconds:.0f} s"
        for name, built in engines.built.items()
    ]


def _next_line(result: BuildReport) -> str:
    if result.engines and result.engines.missing:
        return (
            f"engines are not built: {result.engines.missing}\nnext: copy {result.path} to a "
            "machine with TensorRT 10 or later and the GPU that will serve, and run "
            f"{result.path.name}/{BUILD_SCRIPT} there"
        )
    if result.lacking:
        return (
            f"next: copy {result.path} to a machine with {result.lacking}, and run there: "
            f"trt-eagle3 validate {shlex.quote(result.path.name)}"
        )
    bundle = shlex.quote(str(result.path))
    steps = {
        f"validate {bundle}": "does it match PyTorch?",
        f"bench {bundle}": "how fast is it here?",
        f"serve {bundle}": "OpenAI clients, and a chat page",
    }
    if result.probe:
        steps = {f"probe {shlex.join(result.probe)}": "is the draft read correctly?", **steps}
    return "\n".join(
        ["next, in this order:", *(f"  trt-eagle3 {do}  # {why}" for do, why in steps.items())]
    )


def generation_line(generation: Generation) -> str:
    """Return speed and acceptance in one line."""
    parts = [
        f"{len(generation.token_ids)} tokens",
        f"first after {generation.time_to_first_token_ms:.0f} ms",
    ]
    if generation.tokens_per_second is not None:
        parts.append(f"then {generation.tokens_per_second:.1f} tok/s")
    length, drafted = generation.acceptance_length, len(generation.accepted_lengths)
    parts.append(
        f"acceptance length {'-' if length is None else f'{length:.2f}'} "
        f"(drafts in {drafted} of {generation.num_forwards} forwards)"
    )
    return ", ".join(parts)
