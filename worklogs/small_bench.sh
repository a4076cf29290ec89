#!/usr/bin/env bash
# small_bench.sh MODEL [ARGS...]: what `make bench` does. A formal bench in small: makes a dataset for the checkpoint, starts our server
# as `make serve` does (ARGS are its options), measures, writes a report page, ends the server. From the environment: PYTHON, REQUESTS, CAP,
# CONCURRENCY, TOKENS (of an answer at most), WORK (folder of dataset, server's log and page; default .cache/bench here), OUT (folder of the
# record; default WORK). One at a time in a folder. Exit status: that of formal_perf_bench.py, or 1.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
die() { printf "bench: %s\n" "$*" >&2; exit 1; }
[ $# -ge 1 ] || die "usage: small_bench.sh MODEL [ARGS...]"
model=$1
shift
python=${PYTHON:-python3}
work=${WORK:-$root/.cache/bench}
out=${OUT:-$work}
mkdir -p "$out" "$work"
exec 9> "$work/lock"
flock -n 9 || die "another bench runs in $work; wait for its end, or give another WORK="
# A run of long ago that was killed is nothing to go on with: the server that it measured is gone.
left=$out/formal-perf-ours.partial
[ ! -e "$left" ] || flock -n "$left" rm -f "$left" || die "another run writes $left; wait for its end, or give another OUT="
rm -f "$work"/synthetic_* "$work/record.json" "$work/report.html"

"$python" "$root/worklogs/generate_official_like_dataset.py" --tokenizer "$model" --out "$work" --requests "${REQUESTS:-24}" --seed 3 \
    --cap "${CAP:-4K}" --pictures 0 --bucket 1K:1:0.3 --bucket 2K:2:0.8 --bucket 4K:2:0.6
dataset=$(ls "$work"/synthetic_*.jsonl)

port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
NAME=llm HOST=127.0.0.1 PORT=$port PYTHON=$python bash "$root/requirements/serve.sh" "$model" "$@" > "$work/server.log" 2>&1 9>&- &
server=$!
trap 'kill "$server" 2>/dev/null; wait "$server" 2>/dev/null || true' EXIT
echo "The server starts (its log: $work/server.log)"
until grep -q '^Ready: ' "$work/server.log"; do
    kill -0 "$server" 2>/dev/null || { tail -5 "$work/server.log" >&2; die "the server did not start"; }
    sleep 0.5
done
receipt=$("$python" -c 'import importlib.util as u; print(u.find_spec("vllm").submodule_search_locations[0])')/overlay/receipt.json
"$python" "$root/worklogs/formal_perf_bench.py" "$dataset" --base-url "http://127.0.0.1:$port" --kind ours --receipt "$receipt" \
    --concurrency "${CONCURRENCY:-2}" --exact-tokens --max-tokens "${TOKENS:-32}" --set temperature=0 --out "$out" --json "$work/record.json" \
    --server-pid "$server" --server-command "requirements/serve.sh $(basename "$model") $*"
"$python" "$root/worklogs/report.py" "$work/record.json" --out "$work/report.html"
