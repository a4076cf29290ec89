"""How the platform starts the server: computility-run.yaml, and what the environment puts in its place."""
import difflib
import hashlib
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

# Name in the environment -> option and its other spellings, and what its value must look like.
WHOLE, SHARE, WORD = r"[0-9]+", r"0?\.[0-9]+|1(\.0+)?", r"\S.*"
OPTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "MODEL": (("--model", ), WORD), "SERVED_MODEL_NAME": (("--served-model-name", ), WORD),
    "MAX_MODEL_LEN": (("--max-model-len", ), WHOLE), "MAX_NUM_BATCHED_TOKENS": (("--max-num-batched-tokens", ), WHOLE),
    "MAX_NUM_SEQS": (("--max-num-seqs", ), WHOLE),
    "TENSOR_PARALLEL_SIZE": (("--tensor-parallel-size", "-tp"), WHOLE),
    "GPU_MEMORY_UTILIZATION": (("--gpu-memory-utilization", ), SHARE), "DTYPE": (("--dtype", ), WORD),
    "QUANTIZATION": (("--quantization", "-q"), WORD), "BLOCK_SIZE": (("--block-size", ), WHOLE),
    "CHECKPOINT_MEMORY": (("--checkpoint-memory", ), WORD),
    "CHECKPOINT_HOST_MEMORY": (("--checkpoint-host-memory", ), WORD),
    "CHAT_TEMPLATE": (("--chat-template", ), WORD), "REASONING_PARSER": (("--reasoning-parser", ), WORD),
    "TOOL_CALL_PARSER": (("--tool-call-parser", ), WORD), "PORT": (("--port", ), WHOLE),
}
# 1 adds the flag, 0 takes it away.
FLAGS = {name: f"--{name.lower().replace('_', '-')}" for name in (
    "ENFORCE_EAGER", "ENABLE_CHUNKED_PREFILL", "ENABLE_PREFIX_CACHING", "DISABLE_LOG_REQUESTS",
    "DISABLE_CUSTOM_ALL_REDUCE", "DISABLE_FRONTEND_MULTIPROCESSING", "TRUST_REMOTE_CODE")}
OTHERS = ("PYTHON", "EXTRA_ARGS")
# Read by servers; the whole environment reaches the server, these are named in the record.
PASSED = ("MOE_NATIVE", "MOE_DECODE_NATIVE", "PROF_TRACE", "PROF_TRACE_DIR", "PROF_MOE_SUMMARY", "ENABLE_CUSTOM_IPC",
          "VLLM_ENGINE_ITERATION_TIMEOUT_S", "VLLM_ATTENTION_BACKEND", "VLLM_BASIC_FASTPATH", "VLLM_CPU_KVCACHE_SPACE",
          "VLLM_LOGGING_LEVEL", "VLLM_OVERLAY_CHECKPOINT_CHECKSUMS", "VLLM_OVERLAY_MTP",
          "VLLM_WORKER_MULTIPROC_METHOD", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "HF_HUB_OFFLINE",
          "TRANSFORMERS_OFFLINE")
PREFIX = "VLLM_"
NAMES = (*OPTIONS, *FLAGS, *OTHERS, *PASSED)
# So alike are a name and its misspelling.
ALIKE = 0.85
PORT = 8000


class StartError(Exception):
    """The server cannot be started like that; one line."""


@dataclass(frozen=True)
class Plan:
    """command and environment of the server; overridden: names that the environment put in place of the file's, or
    added; source: SHA-256 of the file."""

    command: list[str]
    environment: dict[str, str]
    overridden: list[str]
    source: str

    def option(self, *names: str) -> str | None:
        """The value of an option, by any of its spellings; of several the last, as the server takes it."""
        value = None
        for place, word in enumerate(self.command):
            if word in names and place + 1 < len(self.command):
                value = self.command[place + 1]
            elif "=" in word and word.split("=", 1)[0] in names:
                value = word.split("=", 1)[1]
        return value

    @property
    def port(self) -> int:
        """Where it will listen."""
        return int(self.option("--port") or PORT)

    @property
    def model_name(self) -> str:
        """In requests."""
        return self.option("--served-model-name") or self.option("--model") or ""


def read(path: Path) -> tuple[dict[str, Any], str]:
    """computility-run.yaml, and its SHA-256.

    Raises:
        StartError: it is not what the platform takes.
    """
    try:
        data = path.read_bytes()
        document = yaml.safe_load(data)
    except OSError as error:
        raise StartError(f"{path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise StartError(f"{path}: no YAML: {' '.join(str(error).split())}") from error
    command = document.get("command") if isinstance(document, dict) else None
    if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
        raise StartError(f"{path}: command must be a list of strings")
    entries = document.get("env") or []
    if not isinstance(entries, list) or not all(
            isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("value"), str)
            for one in entries):
        raise StartError(f"{path}: env must be a list of name and value, both strings")
    return document, hashlib.sha256(data).hexdigest()


def plan(path: Path, words: Sequence[str] = (), environment: Mapping[str, str] = os.environ) -> Plan:
    """The start that the file describes, with the overrides of the environment and of NAME=VALUE words, which win.

    Raises:
        StartError: a misspelt name, a value of the wrong form, a file that is not what the platform takes.
    """
    document, source = read(path)
    of_file = {one["name"]: one["value"] for one in document.get("env") or []}
    known = (*NAMES, *of_file)
    given = _words(words, known)
    for name in environment:
        close = None if name in known else difflib.get_close_matches(name, known, 1, ALIKE)
        if close:
            raise StartError(f"{name} in the environment is no override; did you mean {close[0]}? (Unset it if not.)")
    asked = {name: given.get(name, environment.get(name, "")) for name in known}
    asked = {name: value for name, value in asked.items() if value or name in given}
    command = list(document["command"])
    for name, value in asked.items():
        command = _applied(command, name, value)
    whole = {**of_file, **environment, **{name: value for name, value in given.items() if name not in OPTIONS}}
    for name in (*OPTIONS, *FLAGS, *OTHERS):
        whole.pop(name, None)
    overridden = sorted({*(name for name in asked if of_file.get(name) != asked[name]), *(
        name for name in (*environment, *given) if name.startswith(PREFIX) and name not in of_file)})
    return Plan(command, whole, overridden, source)


def _words(words: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    given = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
            raise StartError(f"{word!r} is not NAME=VALUE")
        if name not in known and not name.startswith(PREFIX):
            close = difflib.get_close_matches(name, known, 1, 0.6)
            raise StartError(f"{name} is no override{f'; did you mean {close[0]}?' if close else ''} (--help lists "
                             "them)")
        given[name] = value
    return given


def _applied(command: list[str], name: str, value: str) -> list[str]:
    if name in OPTIONS:
        spellings, form = OPTIONS[name]
        if not re.fullmatch(form, value):
            raise StartError(f"{name}={value}: {'a whole number' if form == WHOLE else 'a share up to 1'} is needed"
                             if form != WORD else f"{name} is empty")
        if name in ("MODEL", "CHAT_TEMPLATE") and Path(value).exists():
            value = str(Path(value).resolve())
        return _set(command, spellings, value)
    if name in FLAGS:
        if value not in ("0", "1"):
            raise StartError(f"{name}={value}: 1 adds {FLAGS[name]}, 0 takes it away")
        rest = [word for word in command if word != FLAGS[name]]
        return command if value == "1" and len(rest) < len(command) else rest + [FLAGS[name]] * int(value)
    if name == "PYTHON":
        return [value, *command[1:]]
    if name == "EXTRA_ARGS":
        try:
            return command + shlex.split(value)
        except ValueError as error:
            raise StartError(f"EXTRA_ARGS={value}: {error}") from error
    return command


def _set(command: list[str], spellings: tuple[str, ...], value: str) -> list[str]:
    """In its place, or at the end where the command has no such option."""
    for place, word in enumerate(command):
        if word in spellings:
            return [*command[:place + 1], value, *command[place + 2:]]
        if word.split("=", 1)[0] in spellings:
            return [*command[:place], f"{word.split('=', 1)[0]}={value}", *command[place + 1:]]
    return [*command, spellings[0], value]


def check(found: Plan) -> None:
    """Whether what the command names is on this machine.

    Raises:
        StartError: it is not; names the override.
    """
    if shutil.which(found.command[0], path=found.environment.get("PATH")) is None:
        raise StartError(f"there is no {found.command[0]} to run; name an interpreter by PYTHON=")
    model, template = found.option("--model"), found.option("--chat-template")
    if model and os.path.isabs(model) and not (Path(model) / "config.json").exists():
        raise StartError(f"there is no checkpoint at {model} (config.json is missing); name one by MODEL=")
    if template and os.path.isabs(template) and not Path(template).is_file():
        raise StartError(f"there is no chat template {template}; name one by CHAT_TEMPLATE= (the platform's is the "
                         f"{Path(template).name} of this repository)")


def listing() -> str:
    """What can be overridden, for --help."""
    lines = [f"  {name:34s} {', '.join(spellings)}" for name, (spellings, _) in OPTIONS.items()]
    lines += [f"  {name:34s} 1 adds {flag}, 0 takes it away" for name, flag in FLAGS.items()]
    lines += ["  PYTHON                             the interpreter instead of the file's",
              "  EXTRA_ARGS                         words that are added at the end"]
    return "\n".join([*lines, "and for the server itself, which gets the whole environment:",
                      *(f"  {name}" for name in PASSED), "  VLLM_..."])
