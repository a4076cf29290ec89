#!/usr/bin/env bash
# start_platform_245k_repro.sh [NAME=VALUE ...] [OPTIONS]: starts the server exactly as computility-run.yaml says, waits for a real token,
# keeps log, command, versions and the seconds of each phase under remote_results/<date>-<topic>/, and ends the server. Overrides from the
# environment or as words: MAX_MODEL_LEN=245000 MAX_NUM_BATCHED_TOKENS=16384 bash worklogs/remote_scripts/start_platform_245k_repro.sh
# TOPIC names the folder, BENCH_PYTHON runs the bench itself (default: python3). --help lists the overrides and options (--starts, --keep).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
exec "${BENCH_PYTHON:-${PYTHON:-python3}}" "$root/worklogs/startup_bench.py" --topic "${TOPIC:-platform-245k-repro}" "$@"
