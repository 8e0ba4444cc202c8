#!/usr/bin/env bash
# Written by trt-eagle3 {{ tool_version }} for TensorRT-LLM {{ version.name }}: an OpenAI-compatible server, on loopback.
# Over several nodes: srun ... trtllm-llmapi-launch ./serve.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" # the draft's path in llm_api.yaml is relative to this folder
exec trtllm-serve {{ target }} {{ version.config_option }} llm_api.yaml --host "${HOST:-127.0.0.1}" --port "${PORT:-8000}" "$@"
