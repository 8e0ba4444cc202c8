"""The conventions of a draft's producer, as data, and the resolution that all producers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from trt_eagle3.checkpoint.draft_files import DraftFiles
from trt_eagle3.checkpoint.draft_geometry import resolve_geometry
from trt_eagle3.checkpoint.manifest import Source
from trt_eagle3.checkpoint.parallel_keys import resolve_parallel
from trt_eagle3.checkpoint.resolved_fields import ResolvedFields
from trt_eagle3.checkpoint.rope_schedule import RopeConfig, make_rope, read_rope_config
from trt_eagle3.errors import UserError, clip, quote
from trt_eagle3.spec import RopeSpec

__all__ = [
    "AUX_KEYS",
    "DEFAULT_BASE",
    "Producer",
    "ReadRope",
    "RopeReading",
    "geometry_section",
    "resolve",
    "resolve_rope",
    "resolve_target_width",
]

DEFAULT_BASE = 10000.0
AUX_KEYS = (
    "eagle_config.eagle_aux_hidden_state_layer_ids",
    "eagle_aux_hidden_state_layer_ids",
    "aux_hidden_states_layer_ids",
)
_ROPE_FIX = ", or set layout, kind and base of draft.overrides.rope"
_PART = "partial_rotary_factor"
_OF_ANY_KIND = ("mrope_section", _PART)
"""Keys of a rope config that stay valid if an override changes its kind."""


@dataclass(frozen=True)
class RopeReading:
    """A rope config as a producer's code reads it: arguments of ``make_rope`` and their source."""

    kind: str
    base: float
    source: Source
    layout: Literal["1d", "chunked", "interleaved"] = "1d"
    sections: tuple[int, ...] = ()
    warning: str = ""


ReadRope = Callable[[RopeConfig, ResolvedFields], RopeReading]
"""A producer's way to read a rope config."""


@dataclass(frozen=True)
class Producer:
    """One trainer's conventions.

    Attributes:
        evidence: describes the evidence in the files for this producer; empty if there is none.
        read_rope: reads a rope config as its code does.
        aux_keys: config keys (dotted) that may hold the aux layer ids.
        aux_ids: meaning of an id. ``out`` k = output of decoder layer k. ``state`` j = hidden state
            after j layers, which is out(j - 1).
        positions: positions of a 1-D rope. A 3-axis rope uses the target's three axes.
        position_shift, mrope_shift: added to the positions of a 1-D and of a 3-axis draft.
        whole_heads: whether its code rotates all channels of a head, regardless of
            ``partial_rotary_factor``.
        quirks: reads its other fields into ``ResolvedFields``.
    """

    name: str
    evidence: Callable[[DraftFiles], str]
    read_rope: ReadRope
    aux_keys: tuple[str, ...]
    aux_ids: Literal["out", "state"]
    aux_pre_deepstack: bool
    image_rows: Literal["pad", "vision"] = "pad"
    positions: Literal["temporal", "linear"] = "temporal"
    position_shift: int = 0
    mrope_shift: int = 0
    whole_heads: bool = False
    quirks: Callable[[ResolvedFields], None] = lambda _: None


def resolve(producer: Producer, fields: ResolvedFields) -> None:
    """Put every field of the manifest except its tensors."""
    fields.put(
        "producer",
        producer.name,
        "config",
        producer.evidence(fields.files) or "no producer's evidence",
    )
    resolve_geometry(fields, geometry_section(fields))
    _aux_layers(producer, fields)
    producer.quirks(fields)
    rule = f"{producer.name}'s training code"
    fields.put("aux_pre_deepstack", producer.aux_pre_deepstack, "convention", rule)
    for field, value in {
        "residual": "hidden",
        "first_norm": "single",
        "feedback": "pre_norm",
    }.items():
        fields.put(field, value, "convention", rule)
    _image_rows(producer, fields)
    fields.put("image_rows_rotated", True, "convention", "rows move with the token ids")
    resolve_parallel(fields)
    rope = resolve_rope(fields, producer.name, producer.read_rope, producer.whole_heads)
    one_d = rope.layout == "1d"
    fields.put("positions", producer.positions if one_d else "3d", "convention", rule)
    fields.put(
        "position_shift",
        producer.position_shift if one_d else producer.mrope_shift,
        "convention",
        rule,
    )


def geometry_section(fields: ResolvedFields) -> str:
    """Return the config section with the decoder layer's geometry; empty for the top level."""
    section = "transformer_layer_config"
    return section if fields.files.find(section, "object") else ""


def _aux_layers(producer: Producer, fields: ResolvedFields) -> None:
    """Convert ids in the file's convention to out(k). Without ids, use the producers' default."""
    num_target_layers = fields.target.num_layers if fields.target else None
    found = fields.agree("aux_layers", {key: _ids(fields, key) for key in producer.aux_keys})
    if "aux_layers" not in fields.values and found:
        ids, key = found
        meaning, why = _id_meaning(producer, ids, num_target_layers)
        if why:
            fields.warn(
                f"{key} {quote(list(ids))}: {why}; check with probe, or set "
                "draft.overrides.aux_layers"
            )
        if list(ids) != sorted(ids):
            fields.warn(
                f"{key} {quote(list(ids))} is not ascending; every server captures in layer order"
            )
        offset = 1 if meaning == "state" else 0
        detail = f"{key} {quote(list(ids))}, {'states after j layers' if offset else 'out(k) ids'}"
        if min(ids) < offset:
            raise fields.error(
                f"aux layer -1 ({detail}) is out of range: state 0 is the embedding, not a layer's "
                "output. Set draft.overrides.aux_layers."
            )
        fields.put("aux_layers", tuple(sorted(i - offset for i in ids)), "config", detail)
    elif "aux_layers" not in fields.values:
        n = num_target_layers
        if n is None:
            raise fields.error(
                "aux layers: no config key names them. Name the target, or set "
                "draft.overrides.aux_layers."
            )
        fields.put(
            "aux_layers",
            (1, n // 2 - 1, n - 4),
            "convention",
            "no config key: every trainer's default out(k)",
        )
    resolve_target_width(fields)
    _warn_of_unread_ids(producer, fields)


def resolve_target_width(fields: ResolvedFields) -> None:
    """Put ``target_hidden_size``: the columns of fc per aux state."""
    count, fc = len(fields.values["aux_layers"]), fields.files.tensors["fc.weight"]
    if not count or fc.shape[1] % count:
        raise fields.error(
            f"fc.weight {list(fc.shape)} does not take {count} aux states of equal width (aux "
            f"layers {quote(list(fields.values['aux_layers']))}). Set draft.overrides.aux_layers."
        )
    claimed = fields.files.find("num_aux_hidden_states", "whole")
    if claimed not in {None, count} and fields.sources["aux_layers"].kind != "override":
        raise fields.error(
            f"num_aux_hidden_states: {claimed} in config.json, {count} aux layers. Set "
            "draft.overrides.aux_layers."
        )
    width = fc.shape[1] // count
    fields.agree(
        "target_hidden_size",
        {fc.name: width, "target_hidden_size": fields.files.find("target_hidden_size", "whole")},
    )
    fields.put(
        "target_hidden_size", width, "tensor", f"{fc.name} {list(fc.shape)} / {count} aux states"
    )


def _warn_of_unread_ids(producer: Producer, fields: ResolvedFields) -> None:
    """Warn of keys that this producer's code does not read, but that a server may read."""
    taken = fields.values["aux_layers"]
    for key in AUX_KEYS:
        ids = None if key in producer.aux_keys else _ids(fields, key)
        if ids and ids != taken and fields.sources["aux_layers"].kind != "override":
            fields.warn(
                f"{key} {quote(list(ids))}: {producer.name}'s code does not read it; aux layers "
                f"{quote(list(taken))} are used. Check with probe, or set "
                "draft.overrides.aux_layers"
            )


def _image_rows(producer: Producer, fields: ResolvedFields) -> None:
    """Put ``image_rows``. Vision rows have the target's width, so a draft needs the same width."""
    rule, same = (
        f"{producer.name}'s training code",
        fields.values["hidden_size"] == fields.values["target_hidden_size"],
    )
    if not same:
        rule = "vision rows have the target's width, which is not the draft's"
    fields.put("image_rows", producer.image_rows if same else "pad", "convention", rule)
    if fields.values["image_rows"] == "vision" and not same:
        raise fields.error(
            f"image_rows: vision rows are {fields.values['target_hidden_size']} wide, the draft's "
            f"embedding is {fields.values['hidden_size']}. Set draft.overrides.image_rows: pad."
        )


def _ids(fields: ResolvedFields, key: str) -> tuple[int, ...] | None:
    ids = fields.files.find(key, "wholes")
    if not ids:
        return None
    if len(set(ids)) != len(ids):
        raise fields.error(
            f"config.json {key}: {quote(ids)} names a layer twice. Set draft.overrides.aux_layers."
        )
    return tuple(ids)


def _id_meaning(producer: Producer, ids: tuple[int, ...], n: int | None) -> tuple[str, str]:
    """Return ``out`` or ``state``, and the reason if it is not the producer's own convention."""
    if n is not None and producer.aux_ids == "out" and max(ids) == n:
        return "state", f"layer {n} does not exist, so these are states after j layers"
    if n is not None and producer.aux_ids == "state" and ids == (1, n // 2 - 1, n - 4):
        return "out", "this is the default of out(k) trainers, copied unshifted by a converter"
    return producer.aux_ids, ""


def resolve_rope(
    fields: ResolvedFields, producer: str, read_rope: ReadRope, whole_heads: bool
) -> RopeSpec:
    """Put ``rope`` and return it.

    Args:
        producer: its name, for warnings.
        whole_heads: as for ``Producer``.
    """
    override: Mapping[str, Any] = fields.overrides.get("rope", {})
    config = _rope_config(override, fields)
    interpretation = read_rope(config, fields)
    if whole_heads:
        config = _over_whole_heads(config, producer, fields)
    try:
        rope = _rope_of(interpretation, config, override, fields)
    except UserError as error:
        place = (
            f"draft.overrides.rope over {fields.files.config_file}"
            if override
            else fields.files.config_file
        )
        raise UserError(f"{place}: {error}") from error
    _refuse_unused(override, rope, fields)
    source = Source("override", "draft.overrides.rope") if override else interpretation.source
    fields.put("rope", rope, source.kind, source.detail)
    if interpretation.warning and not override:
        fields.warn(interpretation.warning)
    if rope.kind == "dynamic":
        fields.warn("rope_type dynamic: its scaling past max_position_embeddings is not applied")
    return rope


def _rope_config(override: Mapping[str, Any], fields: ResolvedFields) -> RopeConfig:
    where = geometry_section(fields)
    section = fields.files.find(where, "object") if where else fields.files.config
    if {"layout", "kind", "base"} <= override.keys():
        return RopeConfig({}, None, "", fields.files.config_file)
    config = read_rope_config(section or {}, fields.files.config_file, _ROPE_FIX)
    if override.get("kind", config.kind()) == config.kind():
        return config
    return replace(
        config, values={key: config.values[key] for key in _OF_ANY_KIND if key in config.values}
    )


def _over_whole_heads(config: RopeConfig, producer: str, fields: ResolvedFields) -> RopeConfig:
    """Remove ``partial_rotary_factor``, which was copied from a target with partial rotation."""
    if config.part != 1.0:
        fields.warn(
            f"rope: {_PART} {config.part:g} is ignored, as in {producer}'s training code, "
            "which rotates whole heads; servers may rotate a part"
        )
    return replace(config, values={k: v for k, v in config.values.items() if k != _PART})


def _rope_of(
    interpretation: RopeReading,
    config: RopeConfig,
    override: Mapping[str, Any],
    fields: ResolvedFields,
) -> RopeSpec:
    layout = override.get("layout", interpretation.layout)
    sections = override.get("sections", interpretation.sections) or config.sections
    if layout != "1d" and not sections and fields.target is not None:
        sections = fields.target.attention.rope.sections
    return make_rope(
        override.get("kind", interpretation.kind),
        override.get("base", interpretation.base),
        fields.values["head_dim"],
        layout=layout,
        sections=() if layout == "1d" else sections,
        parameters={**config.values, **override},
        max_positions=fields.values["max_position_embeddings"],
    )


def _refuse_unused(override: Mapping[str, Any], rope: RopeSpec, fields: ResolvedFields) -> None:
    """Reject an override without effect, which is a mistake."""
    if override.get("sections") and rope.layout == "1d":
        raise fields.error(
            "draft.overrides.rope.sections: a 1d layout has none. Set rope.layout too, or leave "
            "it out."
        )
    unused = sorted(
        override.keys() - {"layout", "sections", "kind", "base"} - rope.parameters.keys()
    )
    if unused:
        raise fields.error(
            f"draft.overrides.rope.{clip(unused[0])}: rope_type {rope.kind} has no such number. "
            "Set rope.kind too, or leave it out."
        )
