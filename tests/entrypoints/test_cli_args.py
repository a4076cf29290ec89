"""The command line: every launch command that the platform's documents show is accepted as it stands."""

from __future__ import annotations

import shlex

import pytest

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.overlay.serving.errors import StartError
from vllm.overlay.serving.limits import Limits
from vllm.overlay.serving.server import template_kwargs
from vllm.utils import FlexibleArgumentParser

# What public submissions start, and what this project submits (without the template, which is a path of the image).
PUBLIC = """--model /model --served-model-name llm --max-model-len 262144 --gpu-memory-utilization 0.9
 --trust-remote-code -tp 4 --max-num-seqs 1 --disable-log-requests --disable-frontend-multiprocessing
 --max-num-batched-tokens 8192 --enable-chunked-prefill --max-seq-len-to-capture 32768 --enable-auto-tool-choice
 --tool-call-parser qwen3_coder --reasoning-parser qwen3 --enable-prefix-caching"""
OURS = """--model /model --served-model-name llm -tp 4 --dtype float16 --max-model-len 262144
 --gpu-memory-utilization 0.9 --max-num-batched-tokens 16384 --enforce-eager --max-seq-len-to-capture 32768
 --enable-chunked-prefill --enable-prefix-caching --enable-auto-tool-choice --tool-call-parser qwen3_coder
 --reasoning-parser qwen3 --max-num-seqs 8"""


def parse(text: str):
    return make_arg_parser(FlexibleArgumentParser()).parse_args(shlex.split(text))


@pytest.mark.parametrize("command", [PUBLIC, OURS])
def test_launch_commands(command):
    args = parse(command)
    assert (args.reasoning_parser, args.tool_call_parser, args.enable_auto_tool_choice) == ("qwen3", "qwen3_coder",
                                                                                            True)
    assert AsyncEngineArgs.from_cli_args(args).tensor_parallel_size == 4


@pytest.mark.parametrize(("given", "expected"), [
    (None, {}), ("", {}), ('{"enable_thinking": false}', {"enable_thinking": False}), ("{", None), ("[1]", None),
])
def test_variables_of_the_template(given, expected):
    if expected is None:
        with pytest.raises(StartError, match="--default-chat-template-kwargs"):
            template_kwargs(given)
    else:
        assert template_kwargs(given) == expected


@pytest.mark.parametrize("wrong", ["--max-request-bytes 0", "--max-queued-requests -1", "--max-request-bytes many",
                                   "--engine-restarts -1", "--engine-restart-wait -1", "--engine-restart-window 0",
                                   "--shutdown-timeout -1"])
def test_limits_that_make_no_sense(wrong):
    with pytest.raises(SystemExit):
        parse(f"--model m {wrong}")


def test_limits():
    args = parse("--model m")
    assert (args.max_request_bytes, args.max_queued_requests, args.request_timeout, args.log_prompts, args.api_key) == (
        128 << 20, None, None, False, None)
    args = parse("--model m --max-num-seqs 4 --max-queued-requests 0 --request-timeout 0 --api-key a b")
    assert Limits.of(args) == Limits(128 << 20, 4, None) and args.api_key == ["a", "b"]


def test_defaults():
    args = parse("--model m")
    assert (args.host, args.port) == (None, 8000), "all interfaces, port 8000, as the platform expects"
    assert (args.generation_config, args.reasoning_field, args.reasoning_parser) == ("auto", "reasoning_content", None)
    assert not args.trust_request_chat_template


def test_memory_of_checkpoints(capsys):
    arguments = AsyncEngineArgs.from_cli_args(parse("--model m --checkpoint-memory 2GiB --checkpoint-host-memory 0"))
    assert (arguments.checkpoint_memory, arguments.checkpoint_host_memory) == (2 << 30, 0)
    assert AsyncEngineArgs.from_cli_args(parse("--model m")).checkpoint_memory is None
    for wrong in ("lots", "1.2.3", "-1GiB"):
        with pytest.raises(SystemExit):
            parse(f"--model m --checkpoint-memory={wrong}")
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.endswith(f"argument --checkpoint-memory: '{wrong}' is no size such as 31.72GiB or 16.2GB"), line


def test_template_and_switches():
    args = parse("--model m --chat-template x --generation-config vllm --reasoning-field reasoning "
                 "--shutdown-timeout 5")
    assert (args.chat_template, args.generation_config, args.reasoning_field, args.shutdown_timeout) == ("x", "vllm",
                                                                                                         "reasoning", 5)


def test_help_tells_what_is_different_from_stock():
    text = " ".join(make_arg_parser(FlexibleArgumentParser()).format_help().split())
    assert "Defaults to 1 for each modality" not in text
    assert "image=N. Default: any number for the models of this overlay" in text
    assert "after SIGTERM (default 30)" in text
