#!/usr/bin/env bash
# Rewrites serve.txt, test.txt, reference.txt and torch21.txt from their .in files (needs `pip install uv`); arguments go to uv.
# torch, and what only its CUDA build needs, are left out of the locks: its CPU build is another file than PyPI's, so it can
# carry no hash; setup.sh installs the version named in the .in file after everything else.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
for purpose in serve test reference; do
    # What is locked stays as it is where it can; `lock.sh --upgrade` takes the newest of everything.
    cp "$purpose.txt" "$purpose.full"
    uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate --no-header \
        --output-file "$purpose.full" "$purpose.in" "$@"
    awk '/^[a-z0-9]/ { skip = ($0 ~ /^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)==/) } !skip' "$purpose.full" > "$purpose.txt"
    rm "$purpose.full"
done

# One Python, one platform, and PyPI's own torch with its hash. The override: the image joins a torch and a triton that do not ask for each other.
uv pip compile --quiet --python-version 3.10 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-annotate --no-header \
    --override <(grep '^triton==' torch21.in) --output-file torch21.txt torch21.in "$@"
