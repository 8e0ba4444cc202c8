#!/usr/bin/env bash
# From TensorRT's headers to an answer: run.sh TENSORRT_INCLUDE [CONFIG] [IMAGE]
set -euo pipefail
cd "$(dirname "$0")/../.."
include=${1:?usage: run.sh TENSORRT_INCLUDE [CONFIG] [IMAGE], the first the folder of NvInfer.h}
config=${2:-build_configs/qwen3_vl_2b.yaml}
image=${3:-examples/tiny/images/scene.png}
bundle=engines/$(sed -n 's/^name: *//p' "$config")
make plugins TENSORRT_INCLUDE="$include"
.venv/bin/trt-eagle3 build --config "$config"
.venv/bin/trt-eagle3 doctor "$bundle"
.venv/bin/trt-eagle3 generate "$bundle" "What do you see in this image?" --image "$image" --stats
