#!/usr/bin/env bash
# What `make real` shows once the bundle stands: that the target is llama.cpp's, that the bundle computes what PyTorch
# computes, then answers in English.
set -euo pipefail
bundle=${1:-engines/smollm2}
run=.venv/bin
ask() {
    printf '\n> %s\n' "$*"
    "$run/trt-eagle3" generate "$bundle" "$@" --max-tokens 128 --stats
}
printf 'Is the converted target the one that llama.cpp runs?\n\n'
"$run/python" examples/smollm2/check.py engines/smollm2-target
printf '\nDoes the bundle compute what PyTorch computes?\n\n'
"$run/trt-eagle3" validate "$bundle"
ask "Why do the leaves of many trees turn red and yellow in autumn?"
ask "Write a Python function that checks whether a string is a palindrome."
ask "What is 17 times 23? Explain how to do it in your head."
printf '\nThe first question again, without speculation: the same answer, one token per target forward.\n'
ask "Why do the leaves of many trees turn red and yellow in autumn?" --no-speculation
