"""``build_engine.sh``: builds engines with trtexec, on a machine with TensorRT and a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trt_eagle3.config import TensorRTConfig
from trt_eagle3.engine.trt.folder import ENGINE_FILE, ONNX_FOLDER
from trt_eagle3.engine.trt.plugins import PLUGINS_VARIABLE
from trt_eagle3.engine.trt.profiles import Profile

__all__ = ["build_script"]

_HEAD = """\
#!/usr/bin/env bash
# Builds the engines of this bundle with trtexec, on the machine that will run them.
# Needs TensorRT 10 or later (trtexec on PATH) and the plugin library for it:
#   make plugins TENSORRT_INCLUDE=<TensorRT's include folder>
#   export {variable}=<libtrt_eagle3_plugins.so>
# With trt-eagle3 and TensorRT's Python package installed there, `trt-eagle3 build` does the same,
# on TensorRT 8.6 too.
set -euo pipefail
trtexec=${{TRTEXEC:-trtexec}}
plugins=${{{variable}:-}}
missing() {{ echo "$1" >&2; exit 3; }}
library=/path/to/libtrt_eagle3_plugins.so
[ -n "$plugins" ] || missing "no plugin library: export {variable}=$library"
command -v "$trtexec" >/dev/null || missing "trtexec not found: export TRTEXEC=/path/to/trtexec"
[ -f "$plugins" ] || missing "$plugins: no such plugin library"
trtexec=$(realpath -s "$(command -v "$trtexec")")  # both may be relative to the caller's folder
plugins=$(realpath -s "$plugins")
# from 10.3 on, the plugins declare writes into the caches, and the builder must allow them
aliases=
case $("$trtexec" --help 2>&1 || true) in
    *aliasedPluginIO1003*) aliases=--preview=+aliasedPluginIO1003 ;;
esac
cd "$(dirname "$0")"
"""

_ENGINE = """
echo "{graph}"
"$trtexec" --onnx={graph}/{onnx}/model.onnx --saveEngine={graph}/{engine}.partial \\
    --staticPlugins="$plugins" --stronglyTyped --skipInference --noTF32 \\
    --profilingVerbosity=detailed \\
    --timingCacheFile=timing.cache --maxAuxStreams=0 $aliases{options} \\
{profiles}
mv {graph}/{engine}.partial {graph}/{engine}
"""


def build_script(profiles: Mapping[str, Sequence[Profile]], config: TensorRTConfig) -> str:
    """Return the script for the graphs in ``profiles``; the ONNX files are in their folders."""
    parts = [_HEAD.format(variable=PLUGINS_VARIABLE)]
    for graph, of_graph in profiles.items():
        arguments = " \\\n".join(
            _profile_arguments(index, profile) for index, profile in enumerate(of_graph)
        )
        parts.append(
            _ENGINE.format(
                graph=graph,
                onnx=ONNX_FOLDER,
                engine=ENGINE_FILE,
                options=_options(config),
                profiles=arguments,
            )
        )
    return "".join(parts) + '\necho "all engines are built; next: trt-eagle3 doctor"\n'


def _profile_arguments(index: int, profile: Profile) -> str:
    lines = [f"    --profile={index}"]
    for bound, position in (("min", 0), ("opt", 1), ("max", 2)):
        shapes = ",".join(
            f"{name}:{'x'.join(map(str, s[position]))}" for name, s in profile.shapes.items()
        )
        lines.append(f"    --{bound}Shapes={shapes}")
    return " \\\n".join(lines)


def _options(config: TensorRTConfig) -> str:
    options = ""
    if config.optimization_level is not None:
        options += f" --builderOptimizationLevel={config.optimization_level}"
    if config.workspace_mib is not None:
        options += f" --memPoolSize=workspace:{config.workspace_mib}"  # the default unit is MiB
    if config.refit:
        options += " --refit"
    if config.strip_weights:
        options += " --stripWeights"
    return options
