#!/usr/bin/env bash
# What `make demo` shows once the bundle stands: that it computes what PyTorch computes, then answers about images.
set -euo pipefail
bundle=${1:-engines/tiny}
images=examples/tiny/images
ask() {
    printf '\n> %s\n' "$*"
    .venv/bin/trt-eagle3 generate "$bundle" "$@" --stats
}
printf 'Does the engine compute what PyTorch computes?\n\n'
.venv/bin/trt-eagle3 validate "$bundle"
ask "What do you see in this image?" --image "$images/scene.png"
ask "What changed between the two images?" --image "$images/before.png" --image "$images/after.png"
ask "Describe the video." --video "$images/frames"
ask "What is 12 plus 30?"
printf '\nThe first question again, without speculation: the same answer, one token per target forward.\n'
ask "What do you see in this image?" --image "$images/scene.png" --no-speculation
printf '\nAutoregressive (plain) against speculative decoding over these prompts:\n'
.venv/bin/trt-eagle3 bench "$bundle" --batch 1,4 --rounds 3
