#!/usr/bin/env bash
# Lays this project's overlay over the installed vLLM: patch_ops.sh [--root DIR] [plan|apply|verify|revert|status|readme|repin ...].
# Without a command: apply, then verify. $PYTHON chooses the interpreter whose vLLM is meant. See patches/README.md.
# The next line still runs when every line ends in CRLF: its last character is a comment, which takes the CR.
if grep -q $'\r' "${BASH_SOURCE[0]}"; then echo "refused: ${BASH_SOURCE[0]} has CRLF line endings, so the whole checkout may have them: take a fresh git clone, in which .gitattributes keeps LF" >&2; exit 2; fi #
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
python=${PYTHON:-python3}
status=0
# A name on the PATH proves little (pyenv leaves shims that exist and fail), so it is run; what it prints is of no use here.
"$python" -B -c 'import sys; sys.exit(3 if sys.version_info < (3, 10) else 0)' 2>/dev/null || status=$?
case $status in
    0) exec "$python" -B "$here/patches/__main__.py" "$@" ;;
    3) echo "refused: $("$python" -B -c 'import sys; print("%s is Python %d.%d" % ((sys.executable,) + tuple(sys.version_info[:2])))'), and 3.10 or newer is needed: choose another with PYTHON=" >&2 ;;
    *) echo "refused: the interpreter $python does not run (exit status $status): install Python 3.10 or newer, or choose one with PYTHON=" >&2 ;;
esac
exit 2
