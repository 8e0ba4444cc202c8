#!/usr/bin/env bash
# Written by trt-eagle3 {{ version }}.
# Start Triton Inference Server on this repository: ./launch.sh [more tritonserver options]
#   HOST=127.0.0.1 HTTP_PORT=8000 GRPC_PORT=8001 METRICS_PORT=8002   listen address and ports
#   TRT_EAGLE3_ENV   virtual environment with trt_eagle3. Without a tritonserver on PATH, it also needs nvidia-pytriton
#                    and numpy<2. In a checkout, make .venv-triton/.ready creates it as .venv-triton
#   EXIT_TIMEOUT=30  seconds that requests in flight may take after SIGTERM
#   ADMIN_KEY        key of the APIs that change the server: header triton-admin: $ADMIN_KEY
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
environment=${TRT_EAGLE3_ENV:-{{ environment }}}
host=${HOST:-127.0.0.1}
admin_key=${ADMIN_KEY:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
[ -x "$environment/bin/python3" ] || { echo "launch.sh: no Python environment in $environment; set TRT_EAGLE3_ENV" >&2; exit 3; }
export PATH="$environment/bin:$PATH"
options=(
    --model-repository="$repository"
    --http-address="$host" --http-port="${HTTP_PORT:-8000}"
    --grpc-address="$host" --grpc-port="${GRPC_PORT:-8001}"
    --metrics-address="$host" --metrics-port="${METRICS_PORT:-8002}"
    --exit-timeout-secs="${EXIT_TIMEOUT:-30}"
    --disable-auto-complete-config
    --http-restricted-api="model-repository,shared-memory,trace,logging:triton-admin=$admin_key"
    --grpc-restricted-protocol="model-repository,shared-memory,trace,logging:admin=$admin_key"
{%- if not gpu %}
    --allow-gpu-metrics=false --pinned-memory-pool-byte-size=0
{%- endif %}
)
server=${TRITONSERVER:-$(command -v tritonserver || true)}
if [ -n "$server" ]; then
    exec "$server" "${options[@]}" "$@"
fi

lacks() {
    echo "launch.sh: $1. In a checkout of trt-eagle3: make .venv-triton/.ready, then TRT_EAGLE3_ENV=.venv-triton" \
        "$repository/launch.sh; elsewhere, in an environment with trt_eagle3 made for this:" \
        "pip install 'numpy<2' 'ml_dtypes<0.6', then pip install --no-deps nvidia-pytriton==0.7.0" >&2
    exit 3
}

# The server of the nvidia-pytriton wheel: its Python backend needs a copy of this Python version's stub beside it.
read -r version numpy site libraries < <("$environment/bin/python3" -c '
import sys, sysconfig
from importlib.metadata import version
print("%d.%d" % sys.version_info[:2], version("numpy"), sysconfig.get_path("purelib"), sysconfig.get_config_var("LIBDIR"))')
wheel=$site/pytriton/tritonserver
[ -x "$wheel/bin/tritonserver" ] || lacks "no tritonserver on PATH, and no nvidia-pytriton in $environment"
[ -x "$wheel/python_backend_stubs/$version/triton_python_backend_stub" ] || {
    echo "launch.sh: nvidia-pytriton has no stub for Python $version; make an environment with 3.11 or 3.12" >&2
    exit 3
}
[ "${numpy%%.*}" -lt 2 ] || lacks "nvidia-pytriton's server needs numpy<2, $environment has $numpy"
backends=$(mktemp -d)
mkdir "$backends/python"
ln -s "$wheel/backends/python/libtriton_python.so" "$wheel/backends/python/triton_python_backend_utils.py" "$backends/python/"
install -m 755 "$wheel/python_backend_stubs/$version/triton_python_backend_stub" "$backends/python/"
export LD_LIBRARY_PATH="$site/nvidia_pytriton.libs:$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
"$wheel/bin/tritonserver" "${options[@]}" --backend-directory="$backends" "$@" &
child=$!
trap 'kill -TERM "$child"' TERM INT
status=0
wait "$child" || status=$?
while kill -0 "$child" 2>/dev/null; do # a signal ended the first wait
    status=0
    wait "$child" || status=$?
done
rm -r "$backends"
exit "$status"
