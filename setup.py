"""What pyproject.toml cannot say of a wheel: it carries the kernels' sources, and with
``TRT_EAGLE3_PREBUILT=FOLDER`` the libraries that were compiled from them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PREBUILT = os.environ.get("TRT_EAGLE3_PREBUILT")
FOLDERS = ("capi", "kernels", "tensorrt")


def sources() -> list[Path]:
    """Files of plugins/ that a build reads."""
    inside = [path for name in FOLDERS for path in sorted((ROOT / "plugins" / name).rglob("*"))]
    files = [path for path in inside if path.is_file() and "__pycache__" not in path.parts]
    return [ROOT / "plugins/CMakeLists.txt", *files]


class BuildWithKernels(build_py):
    """Puts the kernels' sources into the package as ``plugins/``."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "trt_eagle3"
        for file in sources():
            place = package / file.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, place)
        for library in sorted(Path(PREBUILT).glob("libtrt_eagle3_*.so")) if PREBUILT else ():
            shutil.copy2(library, package)


class PlatformWheel(bdist_wheel):
    """Of any Python, and with libraries of one platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class WithLibraries(Distribution):
    """A wheel with libraries is of one platform."""

    def has_ext_modules(self) -> bool:
        return PREBUILT is not None


COMMANDS = {"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel}

setup(cmdclass=COMMANDS, distclass=WithLibraries)
