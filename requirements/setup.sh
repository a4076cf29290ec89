#!/usr/bin/env bash
# Makes the environments: `setup.sh serve` (.venv with stock vLLM 0.6.3 for CPU), `setup.sh test` (adds the test tools to it),
# `setup.sh reference` (.venv-reference with the transformers that knows the model), `setup.sh torch21` (.venv-torch21 with the Python,
# torch and transformers of the vendor's image). What is done is skipped; each step is stamped with the hash of its inputs. What other
# clones can use, the compiled stock wheel and stock's source, is kept in ${VLLM_OVERLAY_CACHE:-~/.cache/vllm-overlay}.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
cache=${VLLM_OVERLAY_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vllm-overlay}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf "[setup %4ds] %s\n" "$SECONDS" "$*" >&2; }
die() { printf "setup: %s\n" "$*" >&2; exit 1; }

choose_python() {
    for name in python3.11 python3.12 python3.10; do
        # pyenv leaves shims on the PATH that exist and fail, so running it is the only test.
        if "$name" -c '' 2>/dev/null; then echo "$name"; return; fi
    done
    die "no Python 3.11, 3.12 or 3.10 runs here; on Debian 12: apt-get install python3.11 python3.11-venv python3.11-dev"
}

python310() { # prints a Python 3.10 that runs; pyenv's are not on the PATH unless they are chosen
    local each
    for each in python3.10 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.10*/bin/python; do
        if "$each" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))' 2>/dev/null; then echo "$each"; return; fi
    done
    die "no Python 3.10 runs here (the vendor's image has it; neither python3.10 on the PATH nor one of pyenv's): pyenv install 3.10"
}

need_packages() { # names the Debian packages that are missing; root installs them
    local python=$1 missing=()
    "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=("$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')")
    "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
        missing+=("$("$python" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')")
    command -v g++ >/dev/null || missing+=(g++)
    command -v flock >/dev/null || missing+=(util-linux)
    [ -e /usr/include/numa.h ] || missing+=(libnuma-dev)
    [ -e /usr/include/oneapi/dnnl/dnnl.h ] || [ -e /usr/include/dnnl.h ] || missing+=(libdnnl-dev)
    [ ${#missing[@]} = 0 ] && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing Debian packages: ${missing[*]}"
        apt-get update -qq >&2
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
    else
        die "missing: ${missing[*]}; install with: sudo apt-get install ${missing[*]}"
    fi
}

digest() { cat "$@" | sha256sum | cut -c1-16; }
is_done() { [ "$(cat "$1" 2>/dev/null)" = "$2" ]; }

torch_version() { sed -n 's/^\(torch==[0-9.]*\).*/\1/p' "$here/$1.in"; }

install_lock() { # ENVIRONMENT PURPOSE: the lock with hashes, then torch
    local env=$1 purpose=$2 stamp=$1/.stamp-$2 key
    key=$(digest "$here/$purpose.txt" "$here/$purpose.in")
    is_done "$stamp" "$key" && return
    say "$(basename "$env"): installing requirements/$purpose.txt"
    "$env/bin/pip" install --no-deps --require-hashes -r "$here/$purpose.txt"
    local torch; torch=$(torch_version "$purpose")
    if [ -n "$torch" ]; then
        say "$(basename "$env"): installing $torch"
        "$env/bin/pip" install "$torch"
        if [ "$purpose" = serve ] && "$env/bin/pip" show --quiet triton 2>/dev/null; then
            # It comes with a CUDA build of torch, nothing on a CPU uses it, and stock 0.6.3 cannot import this one.
            "$env/bin/pip" uninstall --quiet --yes triton
        fi
    fi
    echo "$key" > "$stamp"
}

make_venv() { # ENVIRONMENT
    [ -x "$1/bin/pip" ] && "$1/bin/python" -c '' 2>/dev/null && return
    local python; python=$(choose_python)
    need_packages "$python"
    say "making $(basename "$1") with $("$python" --version)"
    rm -rf "$1"
    "$python" -m venv "$1"
}

stock_wheel() { # prints the path of the compiled wheel; builds it once
    local python=$root/.venv/bin/python key dir
    grep -qw avx2 /proc/cpuinfo || die "stock vLLM 0.6.3 for CPU needs a processor with AVX2"
    key=$("$python" -c 'import sys, torch; print("cp%d%d-torch%s" % (*sys.version_info[:2], torch.__version__))')-$(digest "$here/build_stock.sh" "$here/stock.txt")
    dir=$cache/$key
    if ! ls "$dir"/vllm-*.whl >/dev/null 2>&1; then
        need_packages "$python"
        say "compiling stock vLLM 0.6.3 for CPU (about 3 minutes on 2 cores)"
        # A CUDA build of torch (what PyPI has for x86-64) asks for the CUDA toolkit as soon as CMake looks for it.
        "$python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' && export Torch_ROOT=$here/torch_without_cuda
        PATH=$root/.venv/bin:$PATH bash "$here/build_stock.sh" "$dir" || die "stock vLLM could not be built"
    fi
    ls "$dir"/vllm-*.whl
}

install_stock() {
    local stamp=$root/.venv/.stamp-stock key wheel
    key=$(digest "$here/build_stock.sh" "$here/stock.txt" "$here/serve.txt")
    is_done "$stamp" "$key" && return
    wheel=$(stock_wheel)
    say ".venv: installing $(basename "$wheel")"
    # A tree with the overlay in it has files that pip does not know.
    rm -rf "$root"/.venv/lib/python3.*/site-packages/vllm
    "$root/.venv/bin/pip" install --quiet --no-deps --force-reinstall "$wheel"
    echo "$key" > "$stamp"
}

stock_source() { # PYTHON: keeps vLLM's source package in the cache
    local python=$1
    [ -e "$cache/vllm-0.6.3.tar.gz" ] && return
    mkdir -p "$cache"
    # Its setup.py runs to name itself; see build_stock.sh.
    VLLM_TARGET_DEVICE=cpu "$python" -m pip download --quiet --no-deps --no-build-isolation --require-hashes --no-binary vllm \
        -d "$cache" -r "$here/stock.txt" || die "vLLM's source package could not be downloaded"
}

browser() { # tests/page drives one; without it they are skipped
    local each
    for each in "${CHROMIUM:-}" chromium-headless-shell chromium chromium-browser google-chrome; do
        [ -n "$each" ] && command -v "$each" >/dev/null && return
    done
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing Debian's Chromium, for the tests of the web page"
        apt-get update -qq >&2
        # Debian before 12 has the whole browser only.
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium-headless-shell >&2 ||
            DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >&2 ||
            die "Chromium could not be installed; tests/page needs it"
    else
        say "no Chromium: the web page is not tested in a browser; sudo apt-get install chromium-headless-shell"
    fi
}

json_schema_suite() { # keeps jsonschema's source package, which has the JSON-Schema-Test-Suite in it, in the cache
    local wanted; wanted=$(sed -n 's/^\(jsonschema\)==\([0-9.]*\) .*/\1-\2.tar.gz/p' "$here/json_schema_suite.txt")
    [ -e "$cache/$wanted" ] && return
    mkdir -p "$cache"
    "$root/.venv/bin/pip" download --quiet --no-deps --require-hashes --no-binary jsonschema -d "$cache" -r "$here/json_schema_suite.txt" ||
        die "jsonschema's source package could not be downloaded"
}

torch21_environment() {
    local env=$root/.venv-torch21 key python
    key=$(digest "$here/torch21.txt")
    if ! is_done "$env/.stamp-torch21" "$key"; then
        python=$(python310)
        say "making .venv-torch21 with $("$python" --version); it takes 5 GB, most of it CUDA's libraries, to which PyPI's torch is linked"
        rm -rf "$env"
        "$python" -m venv "$env"
        "$env/bin/pip" install --quiet --no-deps --require-hashes -r "$here/torch21.txt"
        echo "$key" > "$env/.stamp-torch21"
    fi
    stock_source "$env/bin/python"
}

serve_environment() {
    make_venv "$root/.venv"
    install_lock "$root/.venv" serve
    install_stock
}

main() {
    exec 9> "$root/.setup.lock"
    flock -n 9 || { say "another setup runs in this folder; waiting for it"; flock 9; }
    case ${1:-} in
        serve) serve_environment ;;
        test) serve_environment; install_lock "$root/.venv" test; json_schema_suite; browser ;;
        reference) make_venv "$root/.venv-reference"; install_lock "$root/.venv-reference" reference ;;
        torch21) torch21_environment ;;
        *) die "usage: setup.sh serve|test|reference|torch21" ;;
    esac
}
main "$@"
