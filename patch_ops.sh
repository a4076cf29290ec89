#!/usr/bin/env bash
# Lays this project's overlay over the installed vLLM: patch_ops.sh [--root DIR] [plan|apply|verify|revert|status|readme|repin FILE].
# Without a command: apply, then verify. $PYTHON chooses the interpreter whose vLLM is meant. See patches/README.md.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
exec "${PYTHON:-python3}" -B "$here/patches/__main__.py" "$@"
