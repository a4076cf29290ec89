"""Coding agents from npm at the versions that they are tried at, and how each is told of a server of ours alone.

An agent gets a home of its own and an environment with nothing inherited but PATH. Its updates, telemetry and lists of
other people's models are off, its permissions are on.
"""
from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL = "llm"
CONTEXT, OUTPUT = 131_072, 8_192
APIS = ("chat", "responses", "messages")


@dataclass(frozen=True)
class Task:
    """One call: the name of the agent's tool, and its arguments; {secret} stands for the absolute path of the file."""

    tool: str
    arguments: dict[str, str]


@dataclass(frozen=True)
class Started:
    """What starts an agent beside its program."""

    arguments: list[str]
    environment: dict[str, str]


@dataclass(frozen=True)
class Agent:
    """package, version: on npm; program: its command. apis: which of ours it speaks. read, shell: a call of the tool
    that reads a file, and of the one that runs a command. start(home, base, api, prompt): writes its configuration into
    home; base is the server's URL without /v1."""

    name: str
    package: str
    version: str
    program: str
    apis: tuple[str, ...]
    read: Task
    shell: Task
    start: Callable[[Path, str, str, str], Started]


# The command's redirections are markup to a careless parser.
SHELL = "tr a-z A-Z < secret.txt | tee loud.txt && echo '<done>' \"$(wc -l < loud.txt)\""


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _qwen(home: Path, base: str, api: str, prompt: str) -> Started:
    kind = {"chat": "openai", "messages": "anthropic"}[api]
    settings: dict[str, Any] = {
        "privacy": {"usageStatisticsEnabled": False}, "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False}, "security": {"auth": {"selectedType": kind}}}
    _write(home / ".qwen/settings.json", settings)
    given = {"chat": {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{base}/v1", "OPENAI_MODEL": MODEL},
             "messages": {"ANTHROPIC_API_KEY": "none", "ANTHROPIC_BASE_URL": base, "ANTHROPIC_MODEL": MODEL}}[api]
    return Started(["--auth-type", kind, "--model", MODEL, "--approval-mode", "yolo", "--prompt", prompt], given)


def _pi(home: Path, base: str, api: str, prompt: str) -> Started:
    kind, url = {"chat": ("openai-completions", f"{base}/v1"), "responses": ("openai-responses", f"{base}/v1"),
                 "messages": ("anthropic-messages", base)}[api]
    model = {"id": MODEL, "reasoning": True, "contextWindow": CONTEXT, "maxTokens": OUTPUT}
    _write(home / ".pi/agent/models.json", {
        "providers": {"own": {"baseUrl": url, "api": kind, "apiKey": "none", "models": [model]}}})
    return Started(["--provider", "own", "--model", MODEL, "--print", prompt], {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"})


def _opencode(home: Path, base: str, api: str, prompt: str) -> Started:
    library = {"chat": "@ai-sdk/openai-compatible", "responses": "@ai-sdk/openai", "messages": "@ai-sdk/anthropic"}[api]
    model = {"name": MODEL, "reasoning": True, "tool_call": True, "limit": {"context": CONTEXT, "output": OUTPUT}}
    name = f"own/{MODEL}"
    _write(home / ".config/opencode/opencode.json", {
        "autoupdate": False, "share": "disabled", "model": name, "small_model": name, "permission": {"*": "allow"},
        "provider": {"own": {"npm": library, "name": "own", "models": {MODEL: model},
                             "options": {"baseURL": f"{base}/v1", "apiKey": "none"}}}})
    return Started(["run", "--model", name, prompt],
                   {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"})


AGENTS = {agent.name: agent for agent in (
    Agent("qwen-code", "@qwen-code/qwen-code", "0.15.10", "qwen", ("chat", "messages"),
          Task("read_file", {"file_path": "{secret}"}),
          Task("run_shell_command", {"command": SHELL, "is_background": "false"}), _qwen),
    Agent("pi", "@mariozechner/pi-coding-agent", "0.73.1", "pi", APIS,
          Task("read", {"path": "{secret}"}), Task("bash", {"command": SHELL}), _pi),
    Agent("opencode", "opencode-ai", "1.18.33", "opencode", APIS,
          Task("read", {"filePath": "{secret}"}),
          Task("bash", {"command": SHELL, "description": "Says it loudly"}), _opencode))}


def environment(home: Path, more: dict[str, str]) -> dict[str, str]:
    """All that an agent inherits."""
    return {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home), "LANG": "C.UTF-8", "TERM": "dumb",
            "NO_COLOR": "1", **more}
