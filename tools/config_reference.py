"""Write docs/config.md from the configuration's models: ``python tools/config_reference.py``."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from trt_eagle3.backend_support import SUPPORT
from trt_eagle3.config import BuildConfig
from trt_eagle3.serving import ServingConfig

FILE = Path(__file__).parent.parent / "docs" / "config.md"
_HEAD = """# Configuration

Written by `python tools/config_reference.py` from the models that read it: edit their docstrings.

A build config is YAML: `trt-eagle3 build --config pair.yaml`. `--set KEY=VALUE` sets a key for
one build; dots name its section: `--set limits.max_batch_size=8`. Unknown keys are refused.
[build_configs](../build_configs) has ready ones.

The column "default" holds what `build` takes for a key that the config leaves out. Where backends
differ, the cell names them. A checkpoint given to `serve`, `generate` or `LLM` has the same
defaults, but for backend, device and dtype, which follow the
[machine](serving.md#from-a-checkpoint), and `max_seq_len`, which the target's positions bound.
"""
_SERVING = """
## Limits on requests

`--set KEY=VALUE` of `trt-eagle3 serve` and `deploy`. In a Triton model repository they stand in
`config.pbtxt`.

"""


def main() -> None:
    """Write the page; with ``--check`` say whether it is current."""
    text = page()
    if "--check" in sys.argv:
        sys.exit(FILE.read_text() != text and f"{FILE}: not current. Run {__file__}")
    FILE.write_text(text)


def page() -> str:
    """The whole page."""
    variants = _variants()
    sections = "".join(_section(name, model, variants) for name, model in _models())
    return f"{_HEAD}{sections}{_SERVING}{_table(ServingConfig)}"


def _variants() -> Mapping[str, BuildConfig]:
    """Return a config of each backend and device with nothing else set, by its name here."""
    found = {}
    for backend, support in SUPPORT.items():
        for device in support.devices:
            engine = {"backend": backend, "device": device}
            pair = {name: {"checkpoint": "x"} for name in ("target", "draft")}
            raw = {"name": "x", **pair, "engine": engine}
            label = backend if len(support.devices) == 1 else f"{backend} on {device}"
            found[label] = BuildConfig.model_validate(raw)
    return found


def _models() -> Iterator[tuple[str, type[BaseModel]]]:
    yield "", BuildConfig
    todo = [("", BuildConfig)]
    while todo:
        prefix, model = todo.pop(0)
        for name, field in model.model_fields.items():
            if inner := _model_in(field.annotation):
                yield f"{prefix}{name}", inner
                todo.append((f"{prefix}{name}.", inner))


def _section(name: str, model: type[BaseModel], variants: Mapping[str, BuildConfig]) -> str:
    title = f"## `{name}`" if name else "## The build"
    summary = _plain(inspect.getdoc(model) or "").split("Attributes:")[0].strip()
    return f"\n{title}\n\n{summary}\n\n{_table(model, variants, name)}"


def _table(
    model: type[BaseModel], variants: Mapping[str, BuildConfig] | None = None, section: str = ""
) -> str:
    """Return the table of a model's keys; ``variants``: configs whose ``section`` it is."""
    meanings = _meanings(model)
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner:
            rows.append(f"| `{name}` | section | | below |")
            continue
        default = "required"
        if not field.is_required():
            default = _value(field.get_default(call_default_factory=True, validated_data={}))
            default += _exceptions(f"{section}.{name}", default, variants or {})
        words = (_type(field.annotation), default, meanings.get(name, ""))
        rows.append(
            f"| `{name}` | {' | '.join(word.replace('|', chr(92) + '|') for word in words)} |"
        )
    return "\n".join(rows) + "\n"


def _meanings(model: type[BaseModel]) -> dict[str, str]:
    """What the docstring says of each key; several may stand in one paragraph."""
    text = " ".join((inspect.getdoc(model) or "").split())
    names = "|".join(sorted(model.model_fields, key=len, reverse=True))
    start = rf"(?:^|(?<=[.:] ))((?:{names})(?:, (?:{names}))*): "
    parts = re.split(start, text.partition("Attributes:")[2].strip())
    found: dict[str, str] = {}
    for keys, meaning in zip(parts[1::2], parts[2::2], strict=True):
        for key in keys.split(", "):
            found[key] = _plain(meaning.strip())
    return found


def _plain(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def _exceptions(key: str, default: str, variants: Mapping[str, BuildConfig]) -> str:
    """Return the variants in which ``key`` has another default, each with it."""
    if key == "engine.backend":
        return ""
    found: dict[str, list[str]] = {}
    for label, config in variants.items():
        chosen = key == "engine.device" and " on " in label  # the variant's name has it
        value = default if chosen else _value(_at(config, key))
        if value != default:
            found.setdefault(value, []).append(label)
    return "".join(f"; {value} for {' and '.join(labels)}" for value, labels in found.items())


def _at(config: BuildConfig, key: str) -> Any:
    found: Any = config
    for part in filter(None, key.split(".")):
        found = getattr(found, part)
    return found


def _value(value: Any) -> str:
    if value is None or value is PydanticUndefined:
        return "left out"
    if value in ((), {}, []):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _type(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(args[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin in (Union, UnionType):
        return " or ".join(_type(arg) for arg in args if arg is not type(None))
    if origin is tuple:
        return f"list of {_type(args[0])}"
    names = {bool: "true, false", int: "whole number", float: "number", str: "text", Path: "path"}
    return names.get(annotation, "mapping" if "Mapping" in str(annotation) else str(annotation))


def _model_in(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


if __name__ == "__main__":
    main()
