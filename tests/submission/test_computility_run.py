"""computility-run.yaml: its form, every flag through the server's own parser, and what each flag does to the engine."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.helpers.overlay_world import REPOSITORY
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.overlay.serving import server
from vllm.utils import FlexibleArgumentParser

FILE = "computility-run.yaml"
TEXT = (REPOSITORY / FILE).read_text(encoding="utf-8")
PROGRAM = ["python3", "-m", "vllm.entrypoints.openai.api_server"]
CONTEXTS = (262_144, 245_000, 235_000)  # what is submitted, and the two variants of docs/submission.md
DELIVERED = "/workspace/"


def refusals(text: str) -> list[str]:
    """What is wrong with a computility-run.yaml, one line each; empty when the platform can start the server by it."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        return [f"{FILE}: no YAML: {' '.join(str(error).split())}"]
    if not isinstance(document, dict) or document.keys() != {"concurrency", "command", "env"}:
        return [f"{FILE}: must have exactly concurrency, command and env"]
    found = []
    if type(document["concurrency"]) is not int or document["concurrency"] < 1:
        found.append(f"{FILE}: concurrency must be a whole number of at least 1, got {document['concurrency']!r}")
    for entry in document["env"]:
        if not isinstance(entry, dict) or entry.keys() != {"name", "value"}:
            found.append(f"{FILE}: env: {entry!r} must have exactly name and value")
        elif not isinstance(entry["name"], str) or not isinstance(entry["value"], str):
            found.append(f"{FILE}: env: name and value of {entry['name']} must be strings: quote {entry['value']!r}")
    found += [
        f"{FILE}: command: {word!r} is no string: quote it" for word in document["command"] if not isinstance(word, str)
    ]
    if found:
        return found
    if document["command"][:3] != PROGRAM:
        return [f"{FILE}: command must begin with {' '.join(PROGRAM)}"]
    try:
        args = parse(document["command"])
        server.check_args(args)
    except (ValueError, server.StartError) as error:
        return [f"{FILE}: command: {error}"]
    if document["concurrency"] > args.max_num_seqs:
        found.append(
            f"{FILE}: {document['concurrency']} requests at once find only {args.max_num_seqs} places: "
            "lower concurrency or raise --max-num-seqs"
        )
    return found


def parse(command: list[str]) -> Any:
    """The options as the server reads them, with this repository for what is delivered and for /model, which only the
    platform has. Raises ValueError."""
    words = [str(REPOSITORY / word.removeprefix(DELIVERED)) if word.startswith(DELIVERED) else word for word in command]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            args = make_arg_parser(FlexibleArgumentParser()).parse_args(words[3:])
        except SystemExit:
            raise ValueError(said.getvalue().splitlines()[-1].partition("error: ")[2]) from None
    validate_parsed_serve_args(args)
    if args.model == "/model":
        args.model = str(REPOSITORY)
    return args


def submitted(context: int = CONTEXTS[0]) -> dict[str, Any]:
    """The document, or a variant of it: one number in one line."""
    assert TEXT.count(str(CONTEXTS[0])) == 1
    return yaml.safe_load(TEXT.replace(str(CONTEXTS[0]), str(context)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of the 35B model; no weights."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_bytes((REPOSITORY / "worklogs/model/config.json").read_bytes())
    return folder


@pytest.mark.parametrize("context", CONTEXTS)
def test_every_flag_is_accepted_and_works(context: int, model: Path) -> None:
    document = submitted(context)
    assert refusals(TEXT.replace(str(CONTEXTS[0]), str(context))) == []
    command = document["command"]
    args = parse(command)
    # What the server itself reads.
    assert args.served_model_name == ["llm"]
    assert (args.enable_auto_tool_choice, args.tool_call_parser, args.reasoning_parser) == (
        True,
        "qwen3_coder",
        "qwen3",
    )
    assert command[command.index("--model") + 1] == "/model"
    assert command[command.index("--chat-template") + 1] == f"{DELIVERED}chat_template_multi_system.jinja"
    assert "<tool_call>" in (server.read_template(args.chat_template) or "")
    # What the platform expects without being told: all interfaces, port 8000, the engine in a process of its own.
    assert (args.host, args.port, args.disable_frontend_multiprocessing) == (None, 8000, False)
    # What the engine makes of it.
    args.model, args.tokenizer = str(model), None
    arguments = AsyncEngineArgs.from_cli_args(args)
    arguments.skip_tokenizer_init = True
    config = arguments.create_engine_config()
    effects: dict[str, tuple[Any, Any]] = {
        "--dtype": (config.model_config.dtype, torch.float16),
        "--max-model-len": (config.model_config.max_model_len, context),
        "--enforce-eager": (config.model_config.enforce_eager, True),
        "--max-seq-len-to-capture": (config.model_config.max_seq_len_to_capture, 32_768),
        "--gpu-memory-utilization": (config.cache_config.gpu_memory_utilization, 0.9),
        "--enable-prefix-caching": (config.cache_config.enable_prefix_caching, True),
        "--max-num-seqs": (config.scheduler_config.max_num_seqs, 8),
        "--max-num-batched-tokens": (config.scheduler_config.max_num_batched_tokens, 16_384),
        "--enable-chunked-prefill": (config.scheduler_config.chunked_prefill_enabled, True),
        "-tp": (config.parallel_config.tensor_parallel_size, 4),
    }
    assert {flag: got for flag, (got, _) in effects.items()} == {flag: wanted for flag, (_, wanted) in effects.items()}
    read_by_the_server = {
        "--model",
        "--served-model-name",
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "--reasoning-parser",
        "--chat-template",
    }
    assert {word for word in command[3:] if word.startswith("-")} == effects.keys() | read_by_the_server


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {entry["name"]: entry["value"] for entry in submitted()["env"]}
    assert environment == {
        "PROF_TRACE": "0",
        "PROF_MOE_SUMMARY": "0",
        "ENABLE_CUSTOM_IPC": "1",
        "VLLM_ENGINE_ITERATION_TIMEOUT_S": "3600",
    }
    monkeypatch.setenv("VLLM_ENGINE_ITERATION_TIMEOUT_S", environment["VLLM_ENGINE_ITERATION_TIMEOUT_S"])
    assert envs.VLLM_ENGINE_ITERATION_TIMEOUT_S == 3600


def test_the_document_explains_every_line() -> None:
    text = (REPOSITORY / "docs/submission.md").read_text(encoding="utf-8")
    document = submitted()
    flags = [word for word in document["command"] if word.startswith("-") and word != "-m"]
    names = [entry["name"] for entry in document["env"]]
    unsaid = [word for word in flags + names if f"`{word}" not in text and f" {word}" not in text]
    assert unsaid == []
    assert f"`concurrency: {document['concurrency']}`" in text
    for flag in flags:
        value = document["command"][document["command"].index(flag) + 1]
        assert value.startswith(("-", "/workspace/")) or f"{flag} {value}" in text, f"{flag} {value}"
    for context in CONTEXTS:
        assert f'| `"{context}"` |' in text, context


def test_places_for_n_of_two_beside_the_other_requests() -> None:
    document = submitted()
    places = parse(document["command"]).max_num_seqs
    assert places >= 2 * document["concurrency"], (places, document["concurrency"])


@pytest.mark.parametrize("more, said", [
    (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    (["--max-num-seqs", "many"], "argument --max-num-seqs: invalid int value: 'many'"),
])  # fmt: skip
def test_the_server_refuses_a_flag_in_one_line(
    more: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["api_server.py", *submitted()["command"][3:], *more])
    with pytest.raises(SystemExit) as ended:
        server.main()
    assert (ended.value.code, capsys.readouterr().err) == (1, f"vllm: error: {said}\n")


def without(word: str) -> Callable[[str], str]:
    return lambda text: text.replace(f"  - {word}\n", "")


@pytest.mark.parametrize("spoil, expected", [
    (lambda text: text + "  - name: X\n    value: 1\n", "env: name and value of X must be strings: quote 1"),
    (lambda text: text + "  - name: X\n", "env: {'name': 'X'} must have exactly name and value"),
    (lambda text: text.replace("--enforce-eager", "--enforce-eagerly"),
     "command: unrecognized arguments: --enforce-eagerly"),
    (lambda text: text.replace('"262144"', "262144"), "command: 262144 is no string: quote it"),
    (lambda text: text.replace('"262144"', '"256K"'),
     "command: argument --max-model-len: invalid int value: '256K'"),
    (lambda text: text.replace("float16", "float17"), "command: argument --dtype: invalid choice: 'float17'"),
    (lambda text: text.replace("- qwen3\n", "- qwen4\n"),
     "command: --reasoning-parser qwen4 is not known; choose from"),
    (without("qwen3_coder"), "command: argument --tool-call-parser: expected one argument"),
    (lambda text: text.replace("multi_system", "other"), "command: The supplied chat template string"),
    (without("-m"), "command must begin with python3 -m vllm.entrypoints.openai.api_server"),
    (lambda text: text.replace("concurrency: 4", "concurrency: '4'"),
     "concurrency must be a whole number of at least 1, got '4'"),
    (lambda text: text.replace("concurrency: 4", "concurrency: 9"), "9 requests at once find only 8 places"),
    (lambda text: text.replace("concurrency: 4", "parallel: 4"), "must have exactly concurrency, command and env"),
    (lambda text: text.replace("command:", "\tcommand:"), "no YAML: "),
])  # fmt: skip
def test_a_bad_file_is_one_line(spoil: Callable[[str], str], expected: str) -> None:
    text = spoil(TEXT)
    assert text != TEXT
    found = refusals(text)
    assert len(found) == 1 and found[0].startswith(f"{FILE}: {expected}") and "\n" not in found[0], found
