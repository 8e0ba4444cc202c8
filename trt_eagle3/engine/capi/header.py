"""Write the C headers that are generated from the kernels' descriptions, in a checkout.

``python -m trt_eagle3.engine.capi.header`` writes them into ``plugins/``. They are committed, so
that building the kernels needs no Python. A test compares them with the output of this module.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from enum import IntEnum
from pathlib import Path

from trt_eagle3.engine.capi.kernels import KERNELS
from trt_eagle3.graph.ops import PLUGINS
from trt_eagle3.graph.ops.kernel import (
    ABI_VERSION,
    MAX_RANK,
    AttentionPath,
    ElementType,
    Kernel,
    Mask,
    Status,
)
from trt_eagle3.graph.plugin_ops import PLUGIN_VERSION

__all__ = ["headers", "main"]

_COLUMNS = 100
_MADE = (
    "Made by `python -m trt_eagle3.engine.capi.header` from the descriptions in\n"
    "trt_eagle3/graph/ops and engine/capi/kernels.py: change those."
)
_ENUMS: Mapping[str, type[IntEnum]] = {
    "status": Status,
    "dtype": ElementType,
    "mask": Mask,
    "path": AttentionPath,
}
_C_TYPES = {int: "int32_t", float: "float", Mask: "int32_t", AttentionPath: "int32_t"}
_CPP_TYPES = {**_C_TYPES, Mask: "MaskKind", AttentionPath: "AttentionPath"}
_POINTED_TO = {"int32": "int32_t", "float32": "float", "bool": "uint8_t"}


def headers() -> dict[str, str]:
    """Return path under ``plugins/`` -> text."""
    return {
        "capi/trt_eagle3_kernels.h": _interface(),
        "capi/lists.h": _lists(),
        "kernels/kernel_params.h": _launch_parameters(),
    }


def _interface() -> str:
    """Return the numbers, argument structs and functions of the C library."""
    parts = [
        _comment(_MADE + " Include trt_eagle3.h."),
        "#ifndef TRT_EAGLE3_KERNELS_H\n#define TRT_EAGLE3_KERNELS_H\n",
        "#include <stddef.h>\n#include <stdint.h>\n",
        '#ifdef __cplusplus\nextern "C" {\n#endif\n',
        f"#define TE3_ABI_VERSION {ABI_VERSION}\n#define TE3_MAX_RANK {MAX_RANK}\n",
        *(_enum(name, enum) for name, enum in _ENUMS.items()),
        "typedef struct te3_tensor {\n  void* data;\n  int32_t dtype; /* te3_dtype */\n"
        "  int32_t rank;\n  int64_t shape[TE3_MAX_RANK];\n} te3_tensor;\n",
        *(_struct(kernel) + "\n" + _functions(kernel) for kernel in KERNELS),
        "#ifdef __cplusplus\n}\n#endif\n\n#endif /* TRT_EAGLE3_KERNELS_H */\n",
    ]
    return "\n".join(parts)


def _enum(name: str, enum: type[IntEnum]) -> str:
    prefix = {"status": "TE3", "dtype": "TE3"}.get(name, f"TE3_{name.upper()}")
    members = ",\n".join(f"  {prefix}_{member.name} = {int(member)}" for member in enum)
    doc = _comment(enum.__doc__ or "")
    return f"{doc}typedef enum te3_{name} {{\n{members}\n}} te3_{name};\n"


def _struct(kernel: Kernel) -> str:
    name = f"te3_{kernel.name}_args"
    rows = [(f"te3_tensor {field};", comment) for field, comment in kernel.tensors.items()]
    rows += [_scalar(field, *scalar) for field, scalar in kernel.scalars.items()]
    return (
        f"{_comment(kernel.doc)}typedef struct {name} {{\n{_fields(rows, '/* {} */')}}} {name};\n"
    )


def _scalar(name: str, kind: type[int] | type[float], comment: str) -> tuple[str, str]:
    enum = next((f"te3_{n}" for n, e in _ENUMS.items() if e is kind), "")
    return f"{_C_TYPES[kind]} {name};", "; ".join(filter(None, (enum, comment)))


def _fields(rows: list[tuple[str, str]], comment: str) -> str:
    """Return declarations with aligned comments; ``comment``: the format of each."""
    width = max(len(declaration) for declaration, _ in rows)
    lines = (f"  {text:{width}} {comment.format(doc) if doc else ''}" for text, doc in rows)
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _functions(kernel: Kernel) -> str:
    name, args = f"te3_{kernel.name}", f"const te3_{kernel.name}_args* args"
    if not kernel.workspace:
        return _prototype(f"te3_status {name}", args, "void* stream")
    size = _prototype(f"te3_status {name}_workspace", args, "size_t* bytes")
    launch = (args, "void* workspace", "size_t workspace_bytes", "void* stream")
    return _comment(kernel.workspace) + size + _prototype(f"te3_status {name}", *launch)


def _prototype(start: str, *parameters: str) -> str:
    line = f"{start}({', '.join(parameters)});"
    if len(line) > _COLUMNS:
        line = f"{start}(\n    {', '.join(parameters)});"
    return f"{line}\n"


def _comment(text: str) -> str:
    """Return a C comment; paragraphs of ``text`` stay separate."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    wrapped = ["\n".join(textwrap.wrap(p, _COLUMNS - 6)) for p in paragraphs]
    return "/* " + "\n\n".join(wrapped).replace("\n", "\n * ").replace(" * \n", " *\n") + " */\n"


def _launch_parameters() -> str:
    """Return the structs that kernels are launched with, and the launchers."""
    parts = (
        _line_comments(_MADE + " Include params.h."),
        "#pragma once\n",
        "#include <cuda_runtime_api.h>\n\n#include <cstddef>\n#include <cstdint>\n",
        "namespace trt_eagle3 {\n",
        *(_params(kernel) + "\n" + _launchers(kernel) for kernel in KERNELS),
        "}  // namespace trt_eagle3\n",
    )
    return "\n".join(parts)


def _params(kernel: Kernel) -> str:
    rows = [(f"{_pointer(kernel, name)} {name};", doc) for name, doc in kernel.tensors.items()]
    for line in textwrap.dedent(kernel.sizes).strip().splitlines():
        declaration, _, comment = line.partition("//")
        rows.append((declaration.strip(), comment.strip()))
    rows += [(f"{_CPP_TYPES[kind]} {n};", doc) for n, (kind, doc) in kernel.scalars.items()]
    doc = " ".join(kernel.doc.split("\n\n")[0].split())
    comment = _line_comments("\n".join(textwrap.wrap(doc, _COLUMNS - 3)))
    return f"{comment}struct {kernel.params} {{\n{_fields(rows, ' // {}')}}};\n"


def _pointer(kernel: Kernel, name: str) -> str:
    pointed_to = _POINTED_TO.get(kernel.tensors[name].split()[0], "void")
    return f"{'' if name in kernel.writes else 'const '}{pointed_to}*"


def _launchers(kernel: Kernel) -> str:
    name, params = f"cudaError_t {kernel.name}", f"const {kernel.params}& params"
    if not kernel.workspace:
        return _prototype(name, params, "cudaStream_t stream")
    comment = _line_comments("\n".join(textwrap.wrap(kernel.workspace, _COLUMNS - 3)))
    size = _prototype(f"{name}_workspace", params, "size_t* bytes")
    launch = (params, "void* workspace", "size_t workspace_bytes", "cudaStream_t stream")
    return comment + size + _prototype(name, *launch)


def _line_comments(text: str) -> str:
    return "".join(f"// {line}\n" for line in text.splitlines())


def _lists() -> str:
    """Return macros that apply ``X`` to every kernel or plugin, for code that all share."""
    plain = [f"{k.name}, {k.params}, {len(k.tensors)}" for k in KERNELS if not k.workspace]
    with_workspace = [f"{k.name}, {k.params}, {len(k.tensors)}" for k in KERNELS if k.workspace]
    doc = "// X(name, Params, number of tensors), in the second list of kernels with a workspace."
    lists = (
        _list("TE3_KERNELS", plain),
        _list("TE3_KERNELS_WITH_WORKSPACE", with_workspace),
        "// X(name): the ops that TensorRT has plugins for.",
        _list("TE3_PLUGINS", [op.name for op in PLUGINS.values()]),
        f'#define TE3_PLUGIN_VERSION "{PLUGIN_VERSION}"\n',
    )
    return "\n".join((_line_comments(_MADE) + "#pragma once\n", doc, *lists))


def _list(macro: str, items: Iterable[str]) -> str:
    lines = [f"#define {macro}(X)", *(f"  X({item})" for item in items)]
    return " \\\n".join(lines) + "\n"


def main() -> None:
    """Write the headers of this checkout."""
    plugins = Path(__file__).resolve().parents[3] / "plugins"
    for name, text in headers().items():
        (plugins / name).write_text(text)


if __name__ == "__main__":
    main()
