#!/usr/bin/env bash
# Rewrites serve.txt, test.txt and reference.txt from their .in files (needs `pip install uv`).
# torch, and what only its CUDA build needs, are left out of the locks: its CPU build is another file than PyPI's, so it can
# carry no hash; setup.sh installs the version named in the .in file after everything else.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
for purpose in serve test reference; do
    uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate --no-header \
        --output-file "$purpose.full" "$purpose.in" "$@"
    awk '/^[a-z0-9]/ { skip = ($0 ~ /^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)==/) } !skip' "$purpose.full" > "$purpose.txt"
    rm "$purpose.full"
done
