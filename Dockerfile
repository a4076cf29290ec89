# What the platform builds; docs/submission.md tells all about it. Without network, card, driver and model: nothing is downloaded, and
# neither torch nor vLLM is imported. A step that fails ends the build, so that an unpatched image cannot come out of it.
FROM harbor.4pd.io/modelhubxc/enginex-iluvatar/bi100-3.2.3-x86-ubuntu20.04-py3.10-poc-llm-infer:v1.2.3

WORKDIR /workspace
COPY . /workspace

# Where the vendor's packages lie, ahead of whatever the image itself has on the path: so this build, the server and every process of it
# take the same vLLM, also where the image sets its path in a shell's profile, which neither of them reads.
ENV PYTHONPATH=/usr/local/corex/lib64/python3/dist-packages${PYTHONPATH:+:${PYTHONPATH}}

# Inline, because a script with CRLF could not say so. Only what is ours is looked at: the image may have files of its own in /workspace.
# grep ends with 1 when it finds nothing, which is what is wanted here.
RUN crlf=$(LC_ALL=C grep -rlI "$(printf '\r')\$" Dockerfile computility-run.yaml chat_template_multi_system.jinja patch_ops.sh patches requirements vllm_overrides) \
        || [ $? = 1 ] || exit 2; \
    if [ -n "$crlf" ]; then \
        echo "refused: CRLF line endings in $(echo "$crlf" | wc -l) files:" $(echo "$crlf" | sort | head -n 10)": take a fresh git clone, in which .gitattributes keeps LF" >&2; exit 2; \
    fi

# Called through bash, because execute bits can get lost on the way here. Applies, then verifies by hashes and by a search for the markers.
# --first: should the image have a second vLLM further down the path, it is named and left alone; nothing would ever import it.
RUN bash ./patch_ops.sh --first

# The large-output path is in both endpoints, under the names by which such builds have always looked for it (docs/api.md).
RUN cd /usr/local/corex/lib64/python3/dist-packages/vllm/overlay/serving && grep -q VLLM_BASIC_FASTPATH_THRESHOLD fastpath.py \
    && grep -qE '(=|if) _large_completion_output_fastpath\(' prepare.py && grep -qE '(=|if) _large_completion_output_fastpath\(' completions.py \
    || { echo "refused: the large-output path (VLLM_BASIC_FASTPATH) is not in both endpoints: take a fresh git clone" >&2; exit 2; }

# What the image lacks: llguidance, one wheel without dependencies. Where pip is missing, or too old to know the wheel's tag, Python itself unpacks
# it beside vLLM. Importing it needs neither card nor driver.
RUN cd requirements/wheels && sha256sum -c SHA256SUMS \
    && { python3 -m pip --isolated --disable-pip-version-check install --no-index --no-deps --no-cache-dir llguidance-*.whl \
        || python3 -m zipfile -e llguidance-*.whl /usr/local/corex/lib64/python3/dist-packages; } \
    && python3 -c 'import llguidance; print("structured output by " + llguidance.get_version())'
