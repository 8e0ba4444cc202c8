#!/usr/bin/env bash
# Written by trt-eagle3 {{ tool_version }} for vLLM {{ version }}: an OpenAI-compatible server, on loopback.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" # the draft's path in config.yaml is relative to this folder
exec vllm serve {{ target }} --config config.yaml --host "${HOST:-127.0.0.1}" --port "${PORT:-8000}" "$@"
