"""BuildConfig: one YAML file = one build. Every default stands here, once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from trt_eagle3.errors import UserError

__all__ = [
    "BuildConfig",
    "DraftConfig",
    "EngineConfig",
    "LimitsConfig",
    "SpeculationConfig",
    "TargetConfig",
    "load_config",
    "parse_overrides",
]

PositiveInt = Annotated[int, Field(gt=0, le=1 << 24)]
TreeSide = Annotated[int, Field(gt=0, le=1024)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TargetConfig(_Section):
    """Where the target is: a directory or a Hub id, and for a Hub id its revision."""

    checkpoint: str
    revision: str | None = None


class DraftConfig(_Section):
    """Where the draft is, and what you know better than its files (``DraftManifest`` fields by name)."""

    checkpoint: str
    revision: str | None = None
    overrides: Mapping[str, Any] = Field(default_factory=dict)


class EngineConfig(_Section):
    """What runs the graphs.

    Attributes:
        device: where; ``cuda`` needs the torch backend.
        dtype: the compute type; onnxruntime computes in float32.
        page_size: tokens per page of the KV cache. prefill_chunk: prompt tokens per target pass.
    """

    backend: Literal["onnxruntime", "torch"] = "onnxruntime"
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    page_size: PositiveInt = 16
    prefill_chunk: PositiveInt = 512

    @model_validator(mode="after")
    def _runs(self) -> EngineConfig:
        if self.backend == "onnxruntime" and (self.device, self.dtype) != ("cpu", "float32"):
            raise ValueError(f"onnxruntime runs in float32 on the cpu, got {self.dtype} on {self.device}")
        return self


class LimitsConfig(_Section):
    """What a bundle promises to hold: sequences at once, tokens of each with its answer, visual tokens of a prompt."""

    max_batch_size: PositiveInt = 1
    max_seq_len: PositiveInt = 4096
    max_visual_tokens: PositiveInt = 4096


class SpeculationConfig(_Section):
    """The shape of speculation.

    Attributes:
        mode: ``chain`` drafts one token per step; ``tree`` drafts a static tree.
        steps: draft steps per cycle, the deepest path.
        topk: children per node of a tree at most.
        num_draft_tokens: tokens verified per cycle, the root (last accepted token) included. A chain has steps + 1.
        tree: the static tree as rank paths ([0] is the best child of the root, [0, 1] its second-best child, ...).
            Left out, a tree of ``num_draft_tokens`` nodes is chosen best-first (see ``decode/tree.py``).
    """

    mode: Literal["chain", "tree"] = "chain"
    steps: TreeSide = 5
    topk: TreeSide = 4
    num_draft_tokens: Annotated[int, Field(gt=1)] | None = None
    tree: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...] | None = None

    @model_validator(mode="after")
    def _fits(self) -> SpeculationConfig:
        tokens = self.num_draft_tokens
        if self.mode == "chain" and tokens not in {None, self.steps + 1}:
            raise ValueError(f"a chain of {self.steps} steps has num_draft_tokens {self.steps + 1}, got {tokens}")
        if self.mode == "chain" and self.tree is not None:
            raise ValueError("tree paths need mode: tree, got mode: chain")
        return self


class BuildConfig(_Section):
    """One build. Without a draft the bundle decodes plainly."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    target: TargetConfig
    draft: DraftConfig | None = None
    engine: EngineConfig = EngineConfig()
    limits: LimitsConfig = LimitsConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    output: Path = Path("engines")

    @field_validator("output")
    @classmethod
    def _is_path(cls, output: Path) -> Path:
        if "\0" in str(output):
            raise ValueError("a path holds no NUL character")
        return output


def load_config(path: Path, overrides: Mapping[str, Any] | None = None) -> BuildConfig:
    """Read a build config; ``overrides`` come over its ``draft.overrides``.

    Raises:
        UserError: unreadable, not YAML, an unknown key (the message names the nearest known one), or a bad value.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot read the config: {error}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path}: expected a mapping of config keys, got {type(raw).__name__}")
    if overrides:
        draft = raw.get("draft")
        if not isinstance(draft, dict):
            raise UserError(f"{path}: overrides of a draft given, and no draft in the config")
        own = draft.get("overrides") or {}
        if not isinstance(own, dict):
            raise UserError(f"{path}: draft.overrides: expected a mapping of fields, got {own!r}")
        raw = raw | {"draft": draft | {"overrides": {**own, **overrides}}}
    return config_from_dict(raw, str(path))


def config_from_dict(raw: Mapping[str, Any], origin: str) -> BuildConfig:
    """Check ``raw``; ``origin`` names it in errors."""
    try:
        return BuildConfig.model_validate(raw)
    except ValidationError as error:
        problems = "; ".join(_problem(e) for e in error.errors())
        raise UserError(f"{origin}: {problems}") from error


def parse_overrides(assignments: Iterable[str]) -> dict[str, Any]:
    """``draft.overrides`` of command-line words ``field=value``; values are YAML, dots make sections.

    Raises:
        UserError: a word without ``=``, a value that is not YAML, or a part of what has a plain value already.
    """
    overrides: dict[str, Any] = {}
    for word in assignments:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise UserError(f"--set {word}: expected FIELD=VALUE, for example --set aux_layers=[2,18,33]")
        *sections, last = name.split(".")
        place = overrides
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise UserError(f"--set {word}: {section} has the value {place!r} already. Set it, or its parts.")
        try:
            place[last] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UserError(f"--set {word}: the value is not YAML: {' '.join(str(error).split())}") from error
    return overrides


def _problem(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        known = list(_known_keys(BuildConfig))
        nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
        return f"{key}: unknown key; nearest known key: {nearest[0]}"
    if error["type"] == "missing":
        return f"{key}: required, not given"
    got = "" if isinstance(error["input"], dict) else f", got {error['input']!r}"
    return f"{key}: {error['msg'].removeprefix('Value error, ')}{got}"


def _known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        section = next((a for a in (field.annotation, *_args(field.annotation)) if _is_model(a)), None)
        if section is not None:
            yield from _known_keys(section, f"{prefix}{name}.")


def _args(annotation: Any) -> tuple[Any, ...]:
    return getattr(annotation, "__args__", ())


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
