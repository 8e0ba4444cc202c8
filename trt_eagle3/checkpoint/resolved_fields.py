"""Resolve a draft's manifest fields, with the source of each; overrides take precedence."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from trt_eagle3.checkpoint.draft_files import DraftFiles
from trt_eagle3.checkpoint.manifest import DraftManifest, Eagle3Manifest, Source, SourceKind
from trt_eagle3.errors import UserError, clip, quote
from trt_eagle3.io.validation import problem_text
from trt_eagle3.spec import TargetSpec

__all__ = ["EXTENSION", "MAX_BLOCK", "ResolvedFields", "check_overrides"]

EXTENSION = "trt_eagle3"
"""Key of a draft's config.json for fields that the format has no key for."""

MAX_BLOCK = 64
"""Rows of the largest block, and tokens of the longest parallel chain."""

_ROPE_KEYS = (
    *("layout", "base", "sections", "kind", "factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    *("attention_factor", "truncate"),
)
_D2T = ("offset", "absolute")
_PARTS = ("rope", "d2t")
_COUNT: tuple[str, Callable[[Any], bool]] = ("a positive whole number", lambda n: 0 < n < 2**31)
_RANGES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("num_heads", "num_kv_heads", "head_dim", "vocab_size"), _COUNT),
    "max_position_embeddings": ("0 (unknown) or a positive whole number", lambda n: 0 <= n < 2**31),
    "position_shift": ("0 or 1", lambda n: n in {0, 1}),
    "block_size": (f"a whole number from 1 to {MAX_BLOCK}", lambda n: 0 < n <= MAX_BLOCK),
    "selector_top_k": _COUNT,
    "mask_token_id": ("a token id", lambda n: 0 <= n < 2**31),
    "rms_norm_eps": ("a number from 0 to below 1", lambda x: 0 <= x < 1),
}


_Manifest = TypeVar("_Manifest", bound=DraftManifest)


class ResolvedFields:
    """The fields of a draft resolved so far.

    Attributes:
        files: the draft.
        kind: the class of its manifest.
        target: the target that it serves; None if unknown.
        values, sources: manifest field -> value, and its source.
        overrides: the user's overrides, checked.
    """

    def __init__(
        self,
        files: DraftFiles,
        target: TargetSpec | None,
        overrides: Mapping[str, Any],
        kind: type[DraftManifest] = Eagle3Manifest,
    ) -> None:
        self.files, self.target, self.kind = files, target, kind
        self.overrides = check_overrides(overrides, manifest=kind)
        self.values: dict[str, Any] = {}
        self.sources: dict[str, Source] = {}
        self.warnings: list[str] = []
        own = files.find(EXTENSION, "object") or {}
        place = f"{files.config_file}: {EXTENSION}"
        for field, value in check_overrides(own, place, kind).items():
            if field in {"rope", "d2t"}:
                raise UserError(
                    f"{files.config_file}: {EXTENSION}.{field}: not kept here. Use "
                    f"draft.overrides.{field}."
                )
            self._note(field, value, Source("config", f"{EXTENSION}.{field}"))
        for field, value in self.overrides.items():
            self._note(field, value, Source("override", f"draft.overrides.{field}"))

    def _note(self, field: str, value: Any, source: Source) -> None:
        if field not in {"rope", "d2t"}:
            self.values[field], self.sources[field] = value, source

    def put(self, field: str, value: Any, kind: SourceKind, detail: str) -> None:
        """Set a field, unless an override or ``EXTENSION`` has set it."""
        if field not in self.values:
            self.values[field], self.sources[field] = value, Source(kind, detail)

    def warn(self, message: str) -> None:
        """Add a warning for the user."""
        self.warnings.append(message)

    def error(self, message: str) -> UserError:
        """Create an error about this draft."""
        return UserError(f"{self.files.directory}: {message}")

    def agree(self, field: str, found: Mapping[str, Any]) -> tuple[Any, str] | None:
        """Return the value that several places give, and the first place; None if none does.

        Raises:
            UserError: the places contradict each other, and no override decides.
        """
        given = [(place, value) for place, value in found.items() if value is not None]
        if not given or field in self.values:
            return given[0][::-1] if given else None
        place, value = given[0]
        for other, another in given[1:]:
            if another != value:
                fix = "Correct config.json" + (
                    "." if field in self.kind.decided else f", or set draft.overrides.{field}."
                )
                raise self.error(
                    f"{_words(field)}: {place} has {clip(value, 80)}, {other} has "
                    f"{clip(another, 80)}. {fix}"
                )
        return value, place

    def manifest(self, kind: type[_Manifest]) -> _Manifest:
        """Create the resolved manifest of class ``kind``."""
        known = {f.name for f in fields(kind)}
        assert self.values.keys() <= known, self.values.keys() - known
        return kind(
            path=self.files.directory,
            sources=dict(self.sources),
            warnings=tuple(self.warnings),
            **self.values,
        )


def _words(field: str) -> str:
    return {"vocab_size": "vocabulary", "draft_vocab_size": "draft vocabulary"}.get(field, field)


def check_overrides(
    overrides: Mapping[str, Any],
    origin: str = "draft.overrides",
    manifest: type[DraftManifest] = Eagle3Manifest,
) -> dict[str, Any]:
    """Check overrides and convert their values to the types of ``manifest``.

    ``d2t: absolute`` converts a vocabulary map of target ids. ``rope`` is a mapping of the parts to
    change.

    Args:
        origin: place of the overrides, for errors.
    Raises:
        UserError: a key is unknown (the message names the nearest known one), or a value does not
            fit.
    """
    kind: Any = manifest
    adapters = _adapters(kind)
    known = [*adapters, *(name for name in _PARTS if name not in manifest.decided)]
    checked: dict[str, Any] = {}
    for key, value in overrides.items():
        if key in manifest.decided:
            raise UserError(
                f"{origin}.{key}: the tensors decide it; it cannot be overridden. Leave it out."
            )
        if key not in known:
            raise _unknown(f"{origin}.{key}", key, known)
        if key == "rope":
            checked[key] = _rope_override(value, f"{origin}.rope")
        elif key == "d2t":
            if value not in _D2T:
                raise UserError(
                    f"{origin}.d2t: expected one of {', '.join(_D2T)}, got {quote(value)}"
                )
            checked[key] = value
        else:
            checked[key] = _fit(f"{origin}.{key}", adapters[key], value)
            _check_range(f"{origin}.{key}", key, checked[key])
    layers = checked.get("aux_layers")
    if layers is not None and list(layers) != sorted({k for k in layers if k >= 0}):
        raise UserError(
            f"{origin}.aux_layers: expected ascending layer numbers, got {quote(list(layers))}"
        )
    return checked


def _check_range(name: str, field: str, value: Any) -> None:
    words, fits = _RANGES.get(field, ("", lambda _: True))
    if not fits(value):
        raise UserError(f"{name}: expected {words}, got {quote(value)}")


def _fit(name: str, adapter: TypeAdapter[Any], value: Any) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{name}: {problem_text(first)}, got {quote(value)}") from error


def _unknown(name: str, key: str, known: list[str]) -> UserError:
    name = clip(name)
    nearest = difflib.get_close_matches(clip(key), known, n=1, cutoff=0.0)[0]
    return UserError(f"{name}: unknown key; nearest known key: {nearest}")


def _rope_override(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(
            f"{name}: expected a mapping of {', '.join(_ROPE_KEYS)}, got {quote(value)}"
        )
    types: dict[str, Any] = {
        "layout": _hints()["layout"],
        "sections": tuple[int, ...],
        "kind": str,
        "truncate": bool,
    }
    checked: dict[str, Any] = {}
    for key, part in value.items():
        if key not in _ROPE_KEYS:
            raise _unknown(f"{name}.{key}", str(key), list(_ROPE_KEYS))
        checked[key] = _fit(f"{name}.{key}", TypeAdapter(types.get(key, float)), part)
    return checked


@cache
def _hints() -> dict[str, Any]:
    from trt_eagle3.spec import RopeSpec

    return get_type_hints(RopeSpec)


@cache
def _adapters(manifest: Any) -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(manifest)
    names = (field.name for field in fields(manifest))
    closed = manifest.decided | {"rope"}
    return {name: TypeAdapter(hints[name]) for name in names if name not in closed}
