#!/usr/bin/env bash
# What `make demo` shows once the bundle stands: three questions with speculation on, one with it off.
set -euo pipefail
bundle=${1:-engines/tiny}
images=examples/tiny/images
run=.venv/bin/trt-eagle3
ask() { echo; echo "> $*"; "$run" generate "$bundle" "$@" --stats; }
