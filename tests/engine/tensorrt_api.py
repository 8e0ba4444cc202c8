"""What TensorRT's Python module has in each version, as far as our code may meet it; read from
``tensorrt_api.json``.

The table holds names alone: of classes, their members and arguments, from the public bindings
(``python/src`` of github.com/NVIDIA/TensorRT at the tags ``TAGS``). It is made again by

    python -m tests.engine.tensorrt_api <a git clone of NVIDIA/TensorRT>

``tensorrt_rtx_api.json`` has the same of TensorRT for RTX, whose bindings are not public, as its
docstrings give the signatures; the tests that have its wheels compare it with them. It is made by

    python -m tests.engine.tensorrt_api rtx
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["RTX", "TAGS", "Strict", "members", "read_rtx", "rtx_table", "spans", "version_of"]

TAGS = ("v8.6.1", "v10.0.1", "v10.3.0", "v10.8.0", "v10.14", "v10.16", "v11.0", "v11.1")
RTX = "rtx1.7"
"""The tag of TensorRT for RTX."""
TABLE = Path(__file__).with_name("tensorrt_api.json")
RTX_TABLE = Path(__file__).with_name("tensorrt_rtx_api.json")
RTX_CLASSES = (
    "ComputeCapability",
    "DynamicShapesKernelSpecializationStrategy",
    "IRuntimeCache",
    "IRuntimeConfig",
    "IStreamWriter",
)
CLASSES = (
    "Builder",
    "BuilderFlag",
    "DataType",
    "EngineInspector",
    "ExecutionContextAllocationStrategy",
    "IBuilderConfig",
    "ICudaEngine",
    "IExecutionContext",
    "IHostMemory",
    "ILayer",
    "INetworkDefinition",
    "IOptimizationProfile",
    "IPluginRegistry",
    "IProgressMonitor",
    "ITimingCache",
    "LayerInformationFormat",
    "LayerType",
    "MemoryPoolType",
    "NetworkDefinitionCreationFlag",
    "OnnxParser",
    "OnnxParserRefitter",
    "ParserError",
    "PreviewFeature",
    "ProfilingVerbosity",
    "Refitter",
    "Runtime",
    "TensorIOMode",
)
_OF_NETWORKS = {"num_layers", "get_layer"}  # the rest adds layers, which is the parser's business
VALUE, READ, WRITE = "value", "read-only", "writable"

Member = str | list[list[str]]
"""``VALUE`` of an enumeration; a property, ``READ`` or ``WRITE``; or the arguments of each form
of a method.
"""


@cache
def spans() -> Mapping[str, Mapping[str, list[tuple[str, str, Member]]]]:
    """Class -> member -> what it is, from a tag to another, both included; nothing where it is
    missing.
    """
    found: Mapping[str, Mapping[str, list[tuple[str, str, Member]]]] = json.loads(TABLE.read_text())
    return found


@cache
def rtx_table() -> Mapping[str, Mapping[str, Member]]:
    """Class -> member -> what it is in TensorRT for RTX."""
    found: Mapping[str, Mapping[str, Member]] = json.loads(RTX_TABLE.read_text())
    return found


def version_of(version: str) -> str:
    """The newest tag that is no newer than ``version``, such as ``10.14.1``; the oldest for what
    is older than all. TensorRT for RTX counts from 1.
    """
    number = _numbers(version)
    if number[0] == 1:
        return RTX
    return next((tag for tag in reversed(TAGS) if _numbers(tag)[:2] <= number[:2]), TAGS[0])


@cache
def members(kind: str, tag: str) -> Mapping[str, Member]:
    """What ``kind`` has at ``tag``."""
    if tag == RTX:
        return rtx_table().get(kind, {})
    at = TAGS.index(tag)
    return {
        name: what
        for name, history in spans().get(kind, {}).items()
        for first, last, what in history
        if TAGS.index(first) <= at <= TAGS.index(last)
    }


class Strict:
    """``made`` seen through the signatures of class ``kind`` at a tag: what is not there cannot
    be reached.
    """

    def __init__(self, kind: str, tag: str, made: Any) -> None:
        self.__dict__.update(_kind=kind, _tag=tag, _made=made)

    def __getattr__(self, name: str) -> Any:
        what = self._member(name)
        found = getattr(self._made, name)
        return _checked(f"{self._kind}.{name}", what, found) if isinstance(what, list) else found

    def __setattr__(self, name: str, value: object) -> None:
        if self._member(name) != WRITE:
            raise AttributeError(f"{self._kind}.{name} cannot be set in TensorRT {self._tag}")
        setattr(self._made, name, value)

    def _member(self, name: str) -> Member:
        known = members(self._kind, self._tag)
        if name not in known:
            raise AttributeError(f"{self._kind} has no {name} in TensorRT {self._tag}")
        return known[name]


def _checked(name: str, forms: list[list[str]], function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which must be called as one of ``forms`` allows; a ``=`` ends arguments that
    may be left out.
    """

    def call(*arguments: Any, **named: Any) -> Any:
        for form in forms:
            names, needed = [n.rstrip("=") for n in form], [n for n in form if not n.endswith("=")]
            given = {*names[: len(arguments)], *named}
            if len(given) == len(arguments) + len(named) and set(needed) <= given <= set(names):
                return function(*arguments, **named)
        raise TypeError(
            f"{name}({len(arguments)} arguments, {sorted(named)}): expected one of {forms}"
        )

    return call


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in version.removeprefix("v").split("."))


# Making the table


def _read(checkout: str, tag: str) -> dict[str, dict[str, Member]]:
    git = ["git", "-C", checkout]
    listed = subprocess.run(
        [*git, "ls-tree", "-r", "--name-only", tag, "python/src"], capture_output=True, check=True
    )
    found: dict[str, dict[str, Member]] = {}
    for file in listed.stdout.decode().split():
        if file.endswith(".cpp"):
            text = subprocess.run(
                [*git, "show", f"{tag}:{file}"], capture_output=True, check=True
            ).stdout.decode()
            _read_bindings(re.sub(r"//[^\n]*", "", text), found)
    return found


def _read_bindings(text: str, found: dict[str, dict[str, Member]]) -> None:
    """Of pybind11 declarations: each class with the ``.def``s and ``.value``s that follow its
    name.
    """
    starts = re.compile(
        r'py::(?:class_|enum_)<[^;{]*?>\s*\w*\s*[({]\s*\w+\s*,\s*"(\w+)"|\bm\.def\('
    )
    places = [*starts.finditer(text)]
    ends = [place.start() for place in places[1:]] + [len(text)]
    for place, end in zip(places, ends, strict=False):
        chunk = text[place.start() : end]
        if place[1] is None:
            continue
        own = found.setdefault(place[1], {})
        own.update(dict.fromkeys(re.findall(r'\.value\(\s*"(\w+)"', chunk), VALUE))
        for part in re.split(r"\.(?=def\w*\()", chunk)[1:]:
            _read_member(part, own)


def _read_member(part: str, own: dict[str, Member]) -> None:
    match = re.match(r'(def\w*)\(\s*(?:"(\w+)"|py::init)(.*)', part, re.DOTALL)
    if match is None:
        return
    how, name, rest = match[1], match[2] or "__init__", match[3]
    if how == "def":
        arguments = re.findall(r'(?:"(\w+)"_a|py::arg\("(\w+)"\))(\s*=)?', rest)
        forms = own.setdefault(name, [])
        form = [
            (first or second) + ("=" if default else "") for first, second, default in arguments
        ]
        if isinstance(forms, list) and form not in forms:
            forms.append(form)
    elif how.startswith(("def_property", "def_read")):
        own[name] = READ if how.endswith("only") else WRITE


def _make_table(checkout: str) -> str:
    by_tag = {tag: _read(checkout, tag) for tag in TAGS}
    table: dict[str, dict[str, list[tuple[str, str, Member]]]] = {}
    for kind in CLASSES:
        names = sorted(
            {
                name
                for tag in TAGS
                for name in by_tag[tag].get(kind, {})
                if kind != "INetworkDefinition" or name in _OF_NETWORKS
            }
        )
        table[kind] = {
            name: _history([by_tag[tag].get(kind, {}).get(name) for tag in TAGS]) for name in names
        }
    lines = [
        f' "{kind}": {{\n'
        + ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(history)}" for name, history in table[kind].items()
        )
        + "\n }"
        for kind in CLASSES
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _history(what: list[Member | None]) -> list[tuple[str, str, Member]]:
    history: list[tuple[str, str, Member]] = []
    for tag, before, now in zip(TAGS, [None, *what], what, strict=False):
        if now is not None:
            first = history.pop()[0] if now == before else tag
            history.append((first, tag, now))
    return history


def read_rtx(module: Any) -> dict[str, dict[str, Member]]:
    """What the installed package has, as its docstrings give the signatures."""
    found = {}
    for kind in (*CLASSES, *RTX_CLASSES):
        if (own := getattr(module, kind, None)) is None:
            continue
        names = [name for name in dir(own) if not name.startswith("_")]
        if kind == "INetworkDefinition":
            names = sorted(_OF_NETWORKS)
        found[kind] = {name: _documented(own, name) for name in names}
    return found


def _documented(kind: Any, name: str) -> Member:
    member = next(c.__dict__[name] for c in kind.__mro__ if name in c.__dict__)
    if isinstance(member, property):
        return READ if member.fset is None else WRITE
    if isinstance(member, kind):
        return VALUE
    forms = []
    for signature in re.findall(rf"{name}\((self: .*?)\) -> ", member.__doc__ or ""):
        # arguments begin at "name: "; what stands between may hold commas and brackets
        arguments = re.split(r", (?=\w+: )", signature)[1:]
        forms.append([a.partition(":")[0] + ("=" if " = " in a else "") for a in arguments])
    return [form for at, form in enumerate(forms) if form not in forms[:at]]


if __name__ == "__main__":
    if sys.argv[1] == "rtx":
        lines = [
            f' "{kind}": {{\n'
            + ",\n".join(f"  {json.dumps(n)}: {json.dumps(m)}" for n, m in own.items())
            + "\n }"
            for kind, own in read_rtx(import_module("tensorrt_rtx")).items()
        ]
        RTX_TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    else:
        TABLE.write_text(_make_table(sys.argv[1]))
