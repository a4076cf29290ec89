#!/usr/bin/env bash
# serve.sh KIND MODEL PORT [ARGS...]: one server in the foreground, on 127.0.0.1, that calls the checkpoint `llm`; ours as `make serve`
# starts it, or a peer that setup.sh installed. All use the chat template of ours. ARGS are the server's own options, and win.
# THREADS (default: all cores), PYTHON (ours), QUANT (llama: bf16, f16, f32 or q8_0) from the environment.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
peers=${PEERS:-$root/.cache/peers}
die() { printf "peers/serve: %s\n" "$*" >&2; exit 1; }
[ $# -ge 3 ] || die "usage: serve.sh ours|vllm|llama|transformers MODEL PORT [ARGS...]"
kind=$1 model=$2 port=$3
shift 3
[ -e "$model/config.json" ] || die "no checkpoint at '$model' (config.json is missing)"
template=$root/chat_template_multi_system.jinja
threads=${THREADS:-$(nproc)}
export OMP_NUM_THREADS=$threads HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
# What ours is run with would be found before a peer's own packages.
[ "$kind" = ours ] || unset PYTHONPATH
installed() { [ -e "$peers/$1/$2" ] || die "$1 is not installed: bash worklogs/peers/setup.sh $1"; }

case $kind in
    ours)
        NAME=llm HOST=127.0.0.1 PORT=$port PYTHON=${PYTHON:-$root/.venv/bin/python} exec bash "$root/requirements/serve.sh" "$model" "$@"
        ;;
    vllm)
        installed vllm lib/libiomp5.so
        # By default it keeps one core for itself, and without Intel's OpenMP it runs on one.
        export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-0-$((threads - 1))} VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-2}
        export LD_PRELOAD=$peers/vllm/lib/libiomp5.so
        # It gives up a step after 300 s; one over a whole piece of a prompt can take longer where there is no AVX-512, or others use the cores.
        export VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=${VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS:-1800}
        # Its worker gets the threads of those cores; the variable would give as many to its other processes, where they only spin.
        unset OMP_NUM_THREADS
        exec "$peers/vllm/bin/python" -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name llm --host 127.0.0.1 \
            --port "$port" --chat-template "$template" --enable-prefix-caching --enable-prompt-tokens-details --reasoning-parser qwen3 \
            --enable-auto-tool-choice --tool-call-parser qwen3_xml --max-num-seqs 16 "$@"
        ;;
    llama)
        installed llama build/bin/llama-server
        quant=${QUANT:-bf16}
        converted=$peers/gguf/$(basename "$model")-$(stat -L -c '%n %s %Y' "$model"/*.json "$model"/*.safetensors | sha256sum | cut -c1-12)-$quant.gguf
        if [ ! -e "$converted" ]; then
            installed transformers bin/python
            mkdir -p "$peers/gguf"
            "$peers/transformers/bin/python" "$here/convert_gguf.py" "$peers/llama" --no-mtp --outtype "$quant" --outfile "$converted.part" \
                "$model" || die "the checkpoint could not be converted for llama.cpp"
            mv "$converted.part" "$converted"
        fi
        # A context of its own for each of four streams.
        exec "$peers/llama/build/bin/llama-server" -m "$converted" --alias llm --host 127.0.0.1 --port "$port" -t "$threads" -c 65536 -np 4 \
            --jinja --chat-template-file "$template" "$@"
        ;;
    transformers)
        installed transformers bin/python
        exec "$peers/transformers/bin/python" "$here/transformers_server.py" "$model" --port "$port" "$@"
        ;;
    *) die "'$kind' is none of ours, vllm, llama, transformers" ;;
esac
