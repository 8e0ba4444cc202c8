#!/usr/bin/env bash
# A bundle on Triton Inference Server, asked over HTTP: whole answers, streamed ones, a refusal, and the metrics.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
repository=${1:-engines/triton}
export HTTP_PORT=${HTTP_PORT:-8000} GRPC_PORT=${GRPC_PORT:-8001} METRICS_PORT=${METRICS_PORT:-8002}
export TRT_EAGLE3_ENV=${TRT_EAGLE3_ENV:-$PWD/.venv-triton}
model=http://127.0.0.1:$HTTP_PORT/v2/models/tiny
make --no-print-directory .venv-triton/.ready
.venv/bin/trt-eagle3 build --config build_configs/tiny-serving.yaml
.venv/bin/trt-eagle3 deploy engines/serving/tiny --repository "$repository"

"$repository/launch.sh" >"$repository.log" 2>&1 &
server=$!
trap 'kill "$server" 2>/dev/null; wait "$server" || true' EXIT
until curl --silent --fail "$model/ready"; do
    kill -0 "$server" || { tail "$repository.log"; exit 1; }
    sleep 0.5
done

image="data:image/png;base64,$(base64 -w0 examples/tiny/images/scene.png)"
printf '\nA question, answered in one response:\n'
curl --silent "$model/generate" -d '{"text_input": "What is 12 plus 30?"}'
printf '\n\nAn image, streamed as it comes:\n'
curl --silent "$model/generate_stream" -d @- <<<"{\"text_input\": \"What do you see in this image?\", \"image_url\": \"$image\", \"stream\": true}"
printf 'A file on the server, refused:\n'
curl --silent "$model/generate" -d '{"text_input": "What do you see?", "image_url": "file:///etc/passwd"}'
printf '\n\nWhat the server says of itself:\n'
sleep 1
curl --silent "http://127.0.0.1:$METRICS_PORT/metrics" | grep -E '^trt_eagle3_(acceptance_length|generated_tokens_total|kv_pages|requests_total)'
