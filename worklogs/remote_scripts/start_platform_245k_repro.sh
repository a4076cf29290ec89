#!/usr/bin/env bash
# start_platform_245k_repro.sh [NAME=VALUE ...] [OPTIONS]: starts the server exactly as computility-run.yaml says, waits for a real token,
# keeps log, command, versions and the seconds of each phase under remote_results/<date>-<topic>/, and ends the server. Overrides from the
# environment or as words: MAX_MODEL_LEN=245000 MAX_NUM_BATCHED_TOKENS=16384 bash worklogs/remote_scripts/start_platform_245k_repro.sh
# TOPIC names the folder, BENCH_PYTHON runs the bench itself (default: python3). --help lists the overrides and options (--starts, --keep).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${BENCH_PYTHON:-${PYTHON:-python3}}
# Both come with vLLM's own requirements.
"$python" -c 'import httptools, yaml' 2>/dev/null || {
    echo "start_platform_245k_repro: $python does not run, or lacks httptools or yaml: give BENCH_PYTHON=, the server's interpreter" >&2
    exit 1
}
exec "$python" "$root/worklogs/startup_bench.py" --topic "${TOPIC:-platform-245k-repro}" "$@"
