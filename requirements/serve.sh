#!/usr/bin/env bash
# serve.sh MODEL [ARGS...]: the server as `make serve` starts it, in the foreground; PYTHON, NAME, HOST, PORT from the environment.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
model=$1
shift
[ -e "$model/config.json" ] || { echo "serve: no checkpoint at '$model' (config.json is missing)" >&2; exit 1; }
# No hub can be asked for a local checkpoint, and a slow answer of one would delay the start.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_ENGINE_ITERATION_TIMEOUT_S=${VLLM_ENGINE_ITERATION_TIMEOUT_S:-3600}
# Each sequence that may run owns a recurrent state (63 MB for the 35B model); stock's 256 would fill 16 GB. ARGS come last and win.
exec "${PYTHON:-python3}" -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name "$NAME" --host "$HOST" --port "$PORT" \
    --enable-chunked-prefill --enable-prefix-caching --enable-auto-tool-choice --tool-call-parser qwen3_coder --reasoning-parser qwen3 \
    --chat-template "$root/chat_template_multi_system.jinja" --disable-log-requests \
    --max-num-seqs 16 "$@"
