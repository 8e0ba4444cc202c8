#!/usr/bin/env bash
# Rewrites requirements.lock and requirements-torch.lock: the versions that .venv has now, with the hash of every file that the index has of each,
# so that one lock serves every platform and Python 3.11 and 3.12. Needs uv (pip install uv). To take newer versions:
# .venv/bin/pip install --upgrade NAME, make test, tools/lock.sh, and look at the difference.
# requirements-triton.lock, requirements-tensorrt.lock and requirements-smollm2.lock likewise, from .venv-triton, .venv-tensorrt and .venv-smollm2.
set -euo pipefail
cd "$(dirname "$0")/.."

pins() { "$1/bin/pip" freeze --all --exclude-editable --exclude pip --exclude wheel "${@:2}" | sed 's/+cpu$//'; }

hashed() {
	uv pip compile --quiet --universal --python-version 3.11 --no-deps --generate-hashes --no-header --no-annotate -
}

# The hash of the torch that pip finds here, which may be another build than the index's: one for the CPU alone.
local_torch() {
	folder=$(mktemp -d)
	.venv/bin/pip download --quiet --no-deps --dest "$folder" "$(pins .venv | grep '^torch==')"
	.venv/bin/pip hash "$folder"/torch-* | grep -- --hash
	rm -r "$folder"
}

write() {
	printf '# %s\n' "$2" "Written by tools/lock.sh; do not edit." | cat - "$3" > "$1"
}

locked=$(mktemp)
pins .venv --exclude torch | hashed > "$locked"
write requirements.lock "What make installs, but for torch and the CUDA libraries that it names on Linux." "$locked"

# pip prefers a file whose hash stands in the index to one that lies in a folder, so torch has a lock of its own: make
# downloads whichever build is meant here, and installs it if its hash is in the list.
pins .venv | grep '^torch==' | hashed > "$locked"
known=$(local_torch)
if ! grep -q -- "$known" "$locked"; then
	sed -i "s/^torch==.*/&\n    $known \\\\/" "$locked"
fi
write requirements-torch.lock "torch: the builds of the index, and one for the CPU alone." "$locked"

if [ -x .venv-triton/bin/pip ]; then
	purelib=$(.venv-triton/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	pins .venv-triton --exclude setuptools --path "$purelib" | hashed > "$locked"
	write requirements-triton.lock "The Triton Inference Server of the tests, which needs numpy<2." "$locked"
fi

if [ -d .venv-tensorrt ]; then
	pins .venv --path .venv-tensorrt | hashed > "$locked"
	write requirements-tensorrt.lock "TensorRT for RTX, a registry of TensorRT 11 and CUDA's headers, for the tests." "$locked"
fi

if [ -d .venv-smollm2 ]; then
	pins .venv --path .venv-smollm2 | hashed > "$locked"
	write requirements-smollm2.lock "SmolLM2-135M-Instruct and the reader of its file, for make real." "$locked"
fi
rm "$locked"
