"""Write docs/config.md from the configuration's models: ``python tools/config_reference.py``."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from trt_eagle3.config import BuildConfig
from trt_eagle3.serving import ServingConfig

FILE = Path(__file__).parent.parent / "docs" / "config.md"
_HEAD = """# Configuration

Written by `python tools/config_reference.py` from the models that read it: edit their docstrings.

A build config is YAML: `trt-eagle3 build --config pair.yaml`. `--set KEY=VALUE` sets a key for
one build; dots name its section: `--set limits.max_batch_size=8`. Unknown keys are refused.
[build_configs](../build_configs) has ready ones.
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
    sections = "".join(_section(name, model) for name, model in _models())
    return f"{_HEAD}{sections}{_SERVING}{_table(ServingConfig)}"


def _models() -> Iterator[tuple[str, type[BaseModel]]]:
    yield "", BuildConfig
    todo = [("", BuildConfig)]
    while todo:
        prefix, model = todo.pop(0)
        for name, field in model.model_fields.items():
            if inner := _model_in(field.annotation):
                yield f"{prefix}{name}", inner
                todo.append((f"{prefix}{name}.", inner))


def _section(name: str, model: type[BaseModel]) -> str:
    title = f"## `{name}`" if name else "## The build"
    summary = _plain(inspect.getdoc(model) or "").split("Attributes:")[0].strip()
    return f"\n{title}\n\n{summary}\n\n{_table(model)}"


def _table(model: type[BaseModel]) -> str:
    meanings = _meanings(model)
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner:
            rows.append(f"| `{name}` | section | | below |")
            continue
        default = (
            "required"
            if field.is_required()
            else _default(field.get_default(call_default_factory=True, validated_data={}))
        )
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


def _default(value: Any) -> str:
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
