"""The C headers are what the descriptions of the kernels make of them, and ctypes lays out the same
structs as a C compiler.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from trt_eagle3.engine.capi import header
from trt_eagle3.engine.capi.kernels import KERNELS
from trt_eagle3.engine.capi.structs import TensorStruct, argument_struct

PLUGINS = Path(__file__).resolve().parents[3] / "plugins"


@pytest.mark.parametrize(("name", "text"), header.headers().items())
def test_committed_header_is_what_the_descriptions_make(name: str, text: str) -> None:
    command = "python -m trt_eagle3.engine.capi.header"
    assert (PLUGINS / name).read_text() == text, f"{name} is out of date: run {command}"


def test_headers_name_every_kernel_and_every_field() -> None:
    text = header.headers()["capi/trt_eagle3_kernels.h"]
    for kernel in KERNELS:
        assert f"te3_status te3_{kernel.name}(" in text
        assert (f"te3_{kernel.name}_workspace(" in text) == bool(kernel.workspace)
        assert all(f"te3_tensor {name};" in text for name in kernel.tensors)


def test_compiler_lays_structs_out_as_ctypes_does(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    structs = {f"te3_{kernel.name}_args": argument_struct(kernel) for kernel in KERNELS}
    structs["te3_tensor"] = TensorStruct
    checks = [
        f"_Static_assert(offsetof({name}, {field[0]}) == {getattr(struct, field[0]).offset}, "
        f'"{name}.{field[0]}");'
        for name, struct in structs.items()
        for field in struct._fields_
    ]
    checks += [
        f'_Static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, "{name}");'
        for name, struct in structs.items()
    ]
    source = tmp_path / "layout.c"
    source.write_text("\n".join(('#include "trt_eagle3.h"', *checks)))
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", f"-I{PLUGINS / 'capi'}"]
    subprocess.run([compiler, *flags, "-c", source, "-o", tmp_path / "layout.o"], check=True)
