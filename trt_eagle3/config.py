"""Define BuildConfig: one YAML file is one build. Every default is set here, once."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from trt_eagle3.backend_support import (
    ACTIVATIONS_BACKEND,
    ALL_DTYPES,
    SUPPORT,
    TENSOR_PARALLEL_SIZES,
    BackendSupport,
    DeviceSupport,
)
from trt_eagle3.config_section import PositiveInt, Section, UserPath
from trt_eagle3.errors import UserError, clip, quote
from trt_eagle3.io.validation import problem_text
from trt_eagle3.io.vllm_names import called_here
from trt_eagle3.io.yaml_file import read_yaml
from trt_eagle3.tensorrt_config import TensorRTConfig

__all__ = [
    "BuildConfig",
    "DraftConfig",
    "EngineConfig",
    "KVDtype",
    "LimitsConfig",
    "SpeculationConfig",
    "TargetConfig",
    "TensorRTConfig",
    "config_from_dict",
    "load_config",
    "merged",
    "check_tensor_parallel",
]

_SHORT_NAME = re.compile(r"(b?)fp?(16|32)")
_MAX_PROBLEMS = 4  # maximum problems in one message
TreeSide = Annotated[int, Field(gt=0, le=1024)]
KVDtype = Literal["compute", "fp8"]


def _long_dtype(engine: dict[str, Any]) -> dict[str, Any]:
    """Return ``engine`` with short dtype names made long: ``fp16`` becomes ``float16``."""
    name = engine.get("dtype")
    short = _SHORT_NAME.fullmatch(name) if isinstance(name, str) else None
    return engine | {"dtype": f"{short[1]}float{short[2]}"} if short else engine


class TargetConfig(Section):
    """The target model.

    Attributes:
        checkpoint: a directory or a Hub id. A relative path in a YAML file counts from the current
            directory, or else from the file's.
        revision: branch, tag or commit of a Hub id. Left out: the newest.
    """

    checkpoint: str
    revision: str | None = None


class DraftConfig(Section):
    """The draft model.

    Attributes:
        checkpoint: a directory or a Hub id. ``mtp`` selects the multi-token prediction head in the
            target's own checkpoint (for a folder of that name, write ``./mtp``).
        revision: branch, tag or commit of a Hub id. Left out: the newest.
        overrides: fields of the draft manifest by name, which replace those read from its files.
            ``build --override`` sets one.
    """

    checkpoint: str
    revision: str | None = None
    overrides: Mapping[str, Any] = Field(default_factory=dict)


class EngineConfig(Section):
    """The backend that runs the graphs, and its numeric types.

    Attributes:
        backend: ``onnxruntime``, ``torch`` or ``tensorrt``; each has its own defaults.
        device: the device of the graphs. ``cuda`` needs the torch or the tensorrt backend; tensorrt
            runs on ``cuda`` only.
        dtype: the compute type; ``fp32``, ``fp16`` and ``bf16`` are read as the long names.
            onnxruntime computes in float32 only. For torch on cuda choose bfloat16: its default is
            float32.
        residual: type of the target's residual stream; ``compute`` is ``dtype``. Qwen3-VL exceeds
            the range of float16 there. ``float32`` is for tensorrt in float16 only, and its default
            there.
        weights: quantise the decoder's projections of a 16-bit target at build. ``fp8`` and
            ``int8`` have one scale per row, ``int4`` one per group (``build --calibration``). Head,
            token table, norms, vision tower and draft are not quantised. Left out: the checkpoint's
            weights.
        quantise_head: with ``weights``, quantise the head too. A tied head gets its own weights
            beside the token table.
        activations: input type of products with quantised weights. ``int8`` rounds rows to int8,
            which is less exact: in onnxruntime its accuracy level 4, many times faster; in torch on
            cuda for INT8 weights with one scale per row, for faster prompts. ``fp8`` (torch on cuda
            only) rounds rows to FP8 where the checkpoint requests it or ``weights: fp8`` made the
            weight, for faster prompts. ``compute`` does not round.
        kv_dtype: type of the target's KV cache. ``fp8``: e4m3, half the memory of 16 bits, rounded
            by scales of the checkpoint, of the calibration, or 1. ``compute``: ``dtype``. The
            draft's KV cache is always ``dtype``.
        tensor_parallel: devices of one machine that share the target: 1, 2, 4 or 8; for torch only.
            It can be changed when a bundle is loaded. On cuda each one is a GPU.
        page_size: tokens per page of the KV cache.
        prefill_chunk: prompt tokens per target forward.
        tensorrt: build options of TensorRT; other backends ignore them.
    """

    backend: str = "onnxruntime"
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    residual: Literal["compute", "float32"] = "compute"
    weights: Literal["fp8", "int8", "int4"] | None = None
    quantise_head: bool = False
    activations: Literal["compute", "int8", "fp8"] = "compute"
    kv_dtype: KVDtype = "compute"
    tensor_parallel: PositiveInt = 1
    page_size: PositiveInt = 16
    prefill_chunk: PositiveInt = 512
    tensorrt: TensorRTConfig = TensorRTConfig()

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_backend(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        raw = _long_dtype(raw)
        known = isinstance(name := raw.get("backend"), str) and name in SUPPORT
        return SUPPORT[name].fill(raw) if known else raw

    @field_validator("backend")
    @classmethod
    def _exists(cls, name: str) -> str:
        if name not in SUPPORT:
            raise ValueError(f"expected one of {', '.join(sorted(SUPPORT))}")
        return name

    @model_validator(mode="after")
    def _runs(self) -> EngineConfig:
        support = SUPPORT[self.backend]
        self._check_device(support)
        self._check_activations(support.devices[self.device])
        if support.compiles:
            self.tensorrt.check_weights(self.weights, self.dtype)
        self._check_residual(support)
        self._check_ranks(support)
        if self.quantise_head and self.weights is None:
            raise ValueError("quantise_head: true needs weights: fp8, int8 or int4")
        return self

    def _check_device(self, support: BackendSupport) -> None:
        devices, dtypes = " or ".join(support.devices), " or ".join(support.dtypes)
        if self.device in support.devices and self.dtype in support.dtypes:
            return
        if support.dtypes == ALL_DTYPES:
            raise ValueError(f"{self.backend} runs on device: {devices}, got {self.device}")
        raise ValueError(
            f"{self.backend} runs in {dtypes} on the {devices}, got {self.dtype} on {self.device}. "
            "For another type or device, set backend: torch"
        )

    def _check_activations(self, device: DeviceSupport) -> None:
        if self.activations not in ("compute", *device.activations):
            raise ValueError(
                f"activations: {self.activations} is for {ACTIVATIONS_BACKEND[self.activations]}, "
                f"got {self.backend} on {self.device}. Leave it out."
            )

    def _check_residual(self, support: BackendSupport) -> None:
        if self.residual == "float32" and self.dtype not in support.float32_residual:
            raise ValueError(
                "residual: float32 is for backend: tensorrt with dtype: float16, "
                f"got {self.dtype} on {self.backend}. Leave it out."
            )

    def _check_ranks(self, support: BackendSupport) -> None:
        if self.tensor_parallel not in TENSOR_PARALLEL_SIZES:
            *sizes, most = TENSOR_PARALLEL_SIZES
            expected = f"{', '.join(map(str, sizes))} or {most}"
            raise ValueError(f"tensor_parallel: expected {expected}, got {self.tensor_parallel}")
        if self.tensor_parallel > 1 and not support.has_ranks:
            raise ValueError(
                f"tensor_parallel: {self.tensor_parallel} is for backend: torch, "
                f"got {self.backend}. Leave it out."
            )


def check_tensor_parallel(engine: EngineConfig, size: int) -> None:
    """Check that ``size`` devices can share the target of a bundle.

    Raises:
        UserError: its backend runs on a single device, or the number is not possible.
    """
    try:
        EngineConfig.model_validate(engine.model_dump() | {"tensor_parallel": size})
    except ValidationError as error:
        raise UserError(problem_text(error.errors(include_url=False)[0])) from error


class LimitsConfig(Section):
    """Capacity of the bundle.

    Attributes:
        max_batch_size: sequences decoded at once.
        max_seq_len: tokens of a sequence, prompt and answer. max_visual_tokens: visual tokens of a
            prompt.
        max_kv_tokens: rows of the KV cache. When the running sequences need more rows, some are
            preempted and recomputed later. Left out: ``max_seq_len`` rows for every sequence, on a
            GPU within ``memory_fraction``; on the CPU without ``max_batch_size``, twice
            ``max_seq_len``.
        memory_fraction: share of a GPU's memory for the KV cache where ``max_kv_tokens`` is left
            out. It applies to the memory left after weights, captured graphs and all else that a
            load takes.
        max_waiting: requests in the queue; further requests are refused.
        prefix_cache: keep KV pages of past prompts, and reuse them for prompts with the same
            prefix.
    """

    max_batch_size: PositiveInt = 8
    max_seq_len: PositiveInt = 4096
    max_visual_tokens: PositiveInt = 4096
    max_kv_tokens: PositiveInt | None = None
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    max_waiting: PositiveInt = 256
    prefix_cache: bool = True

    @model_validator(mode="after")
    def _holds_one(self) -> LimitsConfig:
        if self.max_kv_tokens is not None and self.max_kv_tokens < self.max_seq_len:
            raise ValueError(
                f"max_kv_tokens: one sequence needs {self.max_seq_len}, got {self.max_kv_tokens}"
            )
        return self


class SpeculationConfig(Section):
    """The shape of the draft, and when to speculate.

    Attributes:
        mode: ``chain`` drafts one token per step, a block or P-EAGLE draft all in one forward;
            ``tree`` drafts a static tree; ``dynamic`` grows a tree from the draft's scores. A block
            or P-EAGLE draft drafts chains only.
        steps: draft steps per cycle, the length of the deepest path. Left out for a block or
            P-EAGLE draft: the tokens of its trained block.
        topk: maximum children per node of a tree. In a dynamic tree also the nodes expanded at each
            level.
        num_draft_tokens: tokens verified per cycle, including the root (last accepted token). A
            chain has steps + 1.
        tree: the static tree as rank paths ([0] is the best child of the root, [0, 1] its
            second-best child, ...). Left out: a tree of ``num_draft_tokens`` nodes, chosen
            best-first (see ``decode/speculation/tree.py``).
        acceptance_floor: when the acceptance rate of the draft's first token is below this, a
            warning recommends ``probe``.
        adaptive: every step drafts the tree with the best goodput: this one, a smaller one, or
            none. False: always this one.
    """

    mode: Literal["chain", "tree", "dynamic"] = "chain"
    steps: TreeSide = 5
    topk: TreeSide = 4
    num_draft_tokens: Annotated[int, Field(gt=1)] | None = None
    tree: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...] | None = None
    acceptance_floor: Annotated[float, Field(ge=0, le=1)] = 0.25
    adaptive: bool = True

    def same_tree(self, other: SpeculationConfig) -> bool:
        """Return whether both configure the same tree."""
        rest = {"acceptance_floor": 0.0, "adaptive": False}
        return self.model_copy(update=rest) == other.model_copy(update=rest)

    @model_validator(mode="after")
    def _fits(self) -> SpeculationConfig:
        tokens = self.num_draft_tokens
        if self.mode == "chain" and tokens not in {None, self.steps + 1}:
            raise ValueError(
                f"a chain of {self.steps} steps has num_draft_tokens {self.steps + 1}, got {tokens}"
            )
        if self.mode != "tree" and self.tree is not None:
            raise ValueError(f"tree paths need mode: tree, got mode: {self.mode}")
        most = 1 + self.topk + (self.steps - 1) * self.topk**2
        if self.mode == "dynamic" and tokens is not None and tokens > most:
            raise ValueError(
                f"{self.steps} steps of topk {self.topk} consider {most} nodes, got {tokens}"
            )
        return self


class BuildConfig(Section):
    """One build. Without a draft the bundle decodes without speculation.

    Attributes:
        name: name of the bundle and of its folder.
        split_special_tokens: treat control tokens (``<|im_start|>``) in a prompt's text as text.
            False makes tokens of them, which lets the author of a prompt forge a system turn.
        prompts: a prompt file with questions like those of your users. The bundle keeps them;
            ``bench``, ``probe`` and ``validate`` use them by default.
        output: the parent folder of the bundle's folder.
    """

    name: str
    target: TargetConfig
    draft: DraftConfig | None = None
    engine: EngineConfig = EngineConfig()
    limits: LimitsConfig = Field(default_factory=LimitsConfig, validate_default=True)
    speculation: SpeculationConfig = SpeculationConfig()
    split_special_tokens: bool = True
    prompts: UserPath | None = None
    output: UserPath = Path("engines")

    @field_validator("name")
    @classmethod
    def _folder_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(
                "expected letters, digits, dots, dashes and underscores, a letter or digit first"
            )
        return name

    @field_validator("limits", mode="before")
    @classmethod
    def _batch_of_backend(cls, raw: Any, known: ValidationInfo) -> Any:
        """Fill in a batch size where none is given; on the CPU also KV rows for two sequences."""
        given = raw.model_dump(exclude_unset=True) if isinstance(raw, LimitsConfig) else raw
        engine = known.data.get("engine")
        if engine is None or not isinstance(given, dict) or "max_batch_size" in given:
            return given
        device = SUPPORT[engine.backend].devices[engine.device]
        filled = {"max_batch_size": device.batch_size, **given}
        length = given.get("max_seq_len", LimitsConfig().max_seq_len)
        sound = isinstance(length, int) and 0 < length <= 1 << 23
        if engine.device == "cpu" and sound and "max_kv_tokens" not in given:
            filled["max_kv_tokens"] = 2 * length
        return filled


def load_config(
    path: str | Path,
    overrides: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> BuildConfig:
    """Read a build config, and apply ``settings`` and draft ``overrides`` to it.

    A relative path in the file counts from the current folder, or else from the file's folder.

    Args:
        overrides: replace keys of its ``draft.overrides``. settings: replace keys of the config.
    Raises:
        UserError: unreadable, not YAML, an unknown key (the message names the nearest known one),
            or a bad value.
    """
    if not isinstance(path, str | Path):
        raise UserError(
            f"load_config: expected the path of a YAML file, got {type(path).__name__}. Of a "
            "mapping: BuildConfig.model_validate(mapping)"
        )
    try:
        raw = read_yaml(Path(path))
    except OSError as error:
        raise UserError(f"{path}: cannot read the config: {error.strerror}") from error
    if not isinstance(raw, dict):
        got = "an empty file" if raw is None else type(raw).__name__
        raise UserError(f"{path}: expected a mapping of config keys, got {got}")
    raw = merged(_beside(raw, Path(path).absolute().parent), settings or {})
    if overrides:
        draft = raw.get("draft")
        if not isinstance(draft, dict):
            raise UserError(f"{path}: draft overrides given, but the config has no draft")
        own = draft.get("overrides") or {}
        if not isinstance(own, dict):
            raise UserError(
                f"{path}: draft.overrides: expected a mapping of fields, got {quote(own)}"
            )
        raw = raw | {"draft": draft | {"overrides": {**own, **overrides}}}
    return config_from_dict(raw, str(path))


def _beside(raw: Mapping[Any, Any], folder: Path) -> dict[Any, Any]:
    """Return ``raw`` with absolute paths for what is in ``folder`` only."""
    found = {**raw}
    if (prompts := raw.get("prompts")) is not None:
        found["prompts"] = _path_in(folder, prompts)
    for name in ("target", "draft"):
        section = raw.get(name)
        if isinstance(section, Mapping) and "checkpoint" in section:
            found[name] = {**section, "checkpoint": _path_in(folder, section["checkpoint"])}
    return found


def _path_in(folder: Path, value: Any) -> Any:
    """Return the path of ``value`` in ``folder``, if it is there and not in the current folder."""
    if not isinstance(value, str) or not value or "\0" in value:
        return value
    path = Path(value).expanduser()
    if path.is_absolute() or value == "mtp" or os.path.lexists(path):
        return value
    return str(folder / path) if os.path.lexists(folder / path) else value


def merged(raw: Mapping[Any, Any], settings: Mapping[str, Any]) -> dict[Any, Any]:
    """Return ``raw`` with ``settings`` applied, section by section."""
    found = dict(raw)
    for name, value in settings.items():
        own = found.get(name)
        if isinstance(own, Mapping) and isinstance(value, Mapping):
            value = merged(own, value)
        found[name] = value
    return found


def config_from_dict(raw: Mapping[str, Any], origin: str) -> BuildConfig:
    """Validate ``raw``; error messages name it ``origin``."""
    try:
        return BuildConfig.model_validate(raw)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        problems = "; ".join(_problem(e) for e in errors[:_MAX_PROBLEMS])
        rest = f"; and {len(errors) - _MAX_PROBLEMS} more" if len(errors) > _MAX_PROBLEMS else ""
        raise UserError(f"{origin}: {problems}{rest}") from error


def _problem(error: Any) -> str:
    key = clip(".".join(str(part) for part in error["loc"]))
    if error["type"] == "extra_forbidden":
        if ours := called_here(key):
            return f"{key}: vLLM's name; {ours}"
        known = list(_known_keys(BuildConfig))
        nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
        return f"{key}: unknown key; nearest known key: {nearest[0]}"
    if error["type"] == "missing":
        return f"{key}: required, not given"
    got = "" if isinstance(error["input"], dict) else f", got {quote(error['input'])}"
    fix = ""
    if key in ("target", "draft") and isinstance(error["input"], str):
        fix = f". Write {key}: {{checkpoint: {clip(error['input'], 80)}}}"
    return f"{key}: {problem_text(error)}{got}{fix}"


def _known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        section = next(
            (a for a in (field.annotation, *_args(field.annotation)) if _is_model(a)), None
        )
        if section is not None:
            yield from _known_keys(section, f"{prefix}{name}.")


def _args(annotation: Any) -> tuple[Any, ...]:
    return getattr(annotation, "__args__", ())


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
