#!/usr/bin/env bash
# build_stock.sh OUT: compiles PyPI's source package of vLLM 0.6.3 for CPU and puts the wheel into OUT. The python on the PATH must have
# torch and the build tools of serve.in. setup.sh names the cached wheel by this file's hash: a change here compiles anew.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=$1
work=$(mktemp -d)
export VLLM_TARGET_DEVICE=cpu
say() { echo "build_stock: $*" >&2; }

# Its setup.py runs to name itself, and chooses its target by the variable above.
python -m pip download --quiet --no-deps --no-build-isolation --require-hashes --no-binary vllm -d "$work" -r "$here/stock.txt" >&2
tar -C "$work" -xf "$work"/vllm-0.6.3.tar.gz
cd "$work/vllm-0.6.3"
# is_cpu() looks for "cpu" in the distribution's version, which PyPI's source package has fixed to v0.6.3; released wheels carry a
# _version.py, the source package does not.
sed -i 's/^    return "v0.6.3"$/    return "0.6.3+cpu"/' setup.py
grep -q 'return "0.6.3+cpu"' setup.py || { say "vLLM's setup.py is not the one we know"; exit 1; }
printf '__version__ = "0.6.3+cpu"\n__version_tuple__ = (0, 6, 3, "cpu")\n' > vllm/_version.py

( while sleep 20; do say "compiling, $SECONDS s ..."; done ) &
ticker=$!
trap 'kill $ticker 2>/dev/null' EXIT
# Without AVX-512 the quantisation file, the only user of libdnnl, is left out.
if ! VLLM_CPU_DISABLE_AVX512=true MAX_JOBS=$(nproc) python -m pip wheel --no-deps --no-build-isolation -w "$work/wheel" . > "$work/build.log" 2>&1; then
    tail -30 "$work/build.log" >&2
    say "failed; the whole log: $work/build.log"
    exit 1
fi
mkdir -p "$out"
mv "$work"/wheel/vllm-*.whl "$out/"
rm -rf "$work"
