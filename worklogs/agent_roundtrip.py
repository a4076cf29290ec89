"""Real coding agents from npm make a tool round trip against our server, without any other network.

    python worklogs/agent_roundtrip.py [--agent pi] [--api chat] [--task read] [--cache .cache/agents]

The agents (coding_agents.py: packages, versions, settings) are installed with npm into the cache. Then this process
leaves the network (loopback_only.py) and starts our server as `make serve` does, on the small demo checkpoint, with the
middleware that holds the model to an output (tests/conformance/forcing.py): where a request has tools and no result
yet, a call of the agent's own tool, and then a text that repeats what the tool said. Tasks:

  read   the tool that reads a file reads one with a random word in it
  shell  the tool that runs commands writes that word in capitals to another file, and shows it

A run is ok if the agent ended with 0, every answer of ours was a 200, a request held our call with just our arguments
and a result with the word that none before it had, the command's file is there, and the agent printed our words and,
behind them, the word. The record goes to remote_results/. Exit status 0: all ok, 1: some not, or nothing could run.
"""
from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# `tests` for the server's middleware and the demo; the folder of this file for its neighbours, as in the others here.
sys.path[:0] = [str(ROOT), str(ROOT / "worklogs")]
import bench_record  # noqa: E402
from coding_agents import AGENTS, APIS, Agent, Task, environment  # noqa: E402
from loopback_only import leave_network  # noqa: E402

MARK = "It says:"
TASKS = ("read", "shell")
# Seconds that an agent may take. Prompts of 20,000 tokens on a busy CPU are slow.
LIMIT_S = 900
Request = dict[str, Any]


class NothingRuns(Exception):
    """One line that says why."""


@dataclass(frozen=True)
class Seen:
    """What became of one run. files: those in its folder by name; requests: as tests/conformance/recording.py wrote
    them."""

    status: int | None
    printed: str
    files: dict[str, str]
    requests: list[Request]


def install(agent: Agent, cache: Path) -> dict[str, str]:
    """Installs the agent unless it is there. Its npm digest, by npm's own record of what it installed.

    Raises:
        NothingRuns: npm failed.
    """
    folder = cache / f"{agent.name}-{agent.version}"
    if not (folder / "node_modules/.bin" / agent.program).exists():
        folder.mkdir(parents=True, exist_ok=True)
        words = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund",
                 f"{agent.package}@{agent.version}"]
        done = subprocess.run(words, text=True, capture_output=True)
        if done.returncode:
            # The code, then the words; at the end only where npm's log lies.
            raise NothingRuns(f"npm install {agent.package}: {' '.join(done.stderr.splitlines()[:2]) or 'failed'}")
    lock = json.loads((folder / "package-lock.json").read_text(encoding="utf-8"))
    found = lock["packages"][f"node_modules/{agent.package}"]
    if found["version"] != agent.version:
        raise NothingRuns(f"{folder} holds {agent.package} {found['version']}, not {agent.version}; remove it")
    return {"package": agent.package, "version": found["version"], "integrity": found["integrity"]}


def filled(task: Task, folder: Path) -> dict[str, str]:
    """The arguments of the task's call."""
    return {name: value.replace("{secret}", str(folder / "secret.txt")) for name, value in task.arguments.items()}


def answered_items(request: Request) -> Iterator[tuple[str, Any]]:
    """Of a request's history, in any of the APIs: ("call", its arguments) and ("result", its text), in order."""
    body = request["body"] if isinstance(request["body"], dict) else {}
    said = body.get("messages") or body.get("input")
    for message in said if isinstance(said, list) else []:
        for call in message.get("tool_calls") or []:
            yield "call", _object(call["function"]["arguments"])
        if message.get("type") == "function_call":
            yield "call", _object(message["arguments"])
        if message.get("role") == "tool" or message.get("type") == "function_call_output":
            yield "result", _text(message.get("content", message.get("output")))
        for block in message["content"] if isinstance(message.get("content"), list) else []:
            if block.get("type") == "tool_use":
                yield "call", block["input"]
            elif block.get("type") == "tool_result":
                yield "result", _text(block.get("content"))


def _object(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""


def summary(request: Request) -> dict[str, Any]:
    """What the record keeps of a request: no text."""
    body = request["body"] if isinstance(request["body"], dict) else {}
    said = body.get("messages") or body.get("input") or []
    items = said if isinstance(said, list) else [{"role": "user"}]
    return {"method": request["method"], "path": request["path"], "status": request["status"],
            "stream": bool(body.get("stream")), "tools": len(body.get("tools") or []),
            "roles": [item.get("role") or item.get("type") for item in items],
            "fields": sorted(set(body) - {"messages", "input", "tools", "stream", "model"})}


def wrong(seen: Seen, arguments: dict[str, str], word: str) -> list[str]:
    """What is not as it should be; nothing if the round trip was made. arguments: of the call that the model made;
    word: what only its result could say."""
    found = []
    if seen.status != 0:
        found.append(f"the agent {'did not end in time' if seen.status is None else f'ended with {seen.status}'}")
    for request in seen.requests:
        if request["status"] != 200:
            found.append(f"{request['method']} {request['path']}: {request['status'] or 'left without an answer'}")
    holding = [request for request in seen.requests if word in json.dumps(request["body"])]
    if not holding:
        found.append("no request held the tool's result")
    else:
        items = list(answered_items(holding[0]))
        if not any(kind == "result" and word in value for kind, value in items):
            found.append("the word came in another way than as a tool's result")
        calls = [value for kind, value in items if kind == "call"]
        if not any(isinstance(call, dict) and {name: str(value).lower() if isinstance(value, bool) else value
                                               for name, value in call.items()} == arguments for call in calls):
            found.append(f"no call in the history has just our arguments: {calls}")
    if "command" in arguments and word not in seen.files.get("loud.txt", ""):
        found.append("the command's file is not there")
    if not re.search(re.escape(MARK) + r".*" + re.escape(word), seen.printed, re.DOTALL):
        found.append("the agent did not print the answer")
    return found


def run(agent: Agent, api: str, task_name: str, base: str, cache: Path, recorded: Path) -> tuple[dict[str, Any], Seen]:
    """One run in folders of its own: the record's entry, and all that was seen."""
    from tests.conformance.forcing import Plan
    from tests.helpers.forced import call

    task: Task = getattr(agent, task_name)
    secret = f"marzipan-{secrets.token_hex(4)}"
    word = secret.upper() if task_name == "shell" else secret
    recorded.write_text("", encoding="utf-8")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="agent-") as made:
        home, folder = Path(made, "home"), Path(made, "project")
        home.mkdir()
        folder.mkdir()
        (folder / "secret.txt").write_text(secret + "\n", encoding="utf-8")
        arguments = filled(task, folder)
        plan = Plan(f"{MARK} $RESULT", call=call(task.tool, *arguments.items()))
        begun = agent.start(home, plan.base(base), api, "What is the word in secret.txt?")
        program = cache / f"{agent.name}-{agent.version}" / "node_modules/.bin" / agent.program
        status, printed, errors = _finished([str(program), *begun.arguments], folder,
                                            environment(home, begun.environment))
        files = {path.name: path.read_text(encoding="utf-8", errors="replace") for path in folder.iterdir()
                 if path.is_file()}
    requests = [json.loads(line) for line in recorded.read_text(encoding="utf-8").splitlines()]
    seen = Seen(status, printed, files, requests)
    found = wrong(seen, arguments, word)
    entry = {"agent": agent.name, "api": api, "task": task_name, "tool": task.tool, "outcome": found or "ok",
             "seconds": round(time.monotonic() - start, 1), "requests": [summary(request) for request in requests]}
    if found:
        entry["printed"] = printed[-1500:]
        entry["errors"] = errors[-1500:]
    return entry, seen


def _finished(words: list[str], folder: Path, given: dict[str, str]) -> tuple[int | None, str, str]:
    """Exit status (None: killed after LIMIT_S), stdout, stderr of an agent and all that it started."""
    process = subprocess.Popen(words, cwd=folder, env=given, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True)
    status: int | None = None
    try:
        printed, errors = process.communicate(timeout=LIMIT_S)
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, errors = process.communicate()
    return status, printed, errors


@contextmanager
def own_server(folder: Path, recorded: Path) -> Iterator[tuple[str, str]]:
    """The URL of our server on the small demo checkpoint, and the overlay's manifest as it tells it at the start."""
    from tests.conformance import recording
    from tests.helpers.server_process import ServerProcess, free_port
    from tests.helpers.small_demo import small_demo

    port = free_port()
    given = {**os.environ, "PYTHON": sys.executable, "NAME": "llm", "HOST": "127.0.0.1", "PORT": str(port),
             "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
             recording.FILE: str(recorded)}
    command = ["bash", ROOT / "requirements/serve.sh", small_demo(), "--dtype", "float32",
               "--middleware", "tests.conformance.forcing.Forcing",
               "--middleware", "tests.conformance.recording.Recording"]
    server = ServerProcess(command, port, folder / "log", given)
    try:
        server.wait_until_ready()
        told = re.search(r"manifest (\w+)", server.output())
        yield server.base, told[1] if told else ""
    except AssertionError as error:
        raise NothingRuns(str(error)) from error
    finally:
        server.end(ask=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agent", action="append", choices=list(AGENTS), help="may be repeated; default: all")
    parser.add_argument("--api", action="append", choices=APIS, help="may be repeated; default: all the agent speaks")
    parser.add_argument("--task", action="append", choices=TASKS, help="may be repeated; default: both")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache/agents", help="where npm installs the agents")
    parser.add_argument("--bodies", type=Path, help="file for all requests as they were sent, in JSON lines")
    parser.add_argument("--out", type=Path, default=bench_record.RESULTS, help="folder of the record")
    parser.add_argument("--no-progress", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse(arguments)

    def say(text: str) -> None:
        if not options.no_progress:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    cache, state, start = options.cache.resolve(), bench_record.commit(), time.monotonic()
    chosen = [AGENTS[name] for name in options.agent or AGENTS]
    wanted = [(agent, api, task) for agent in chosen for api in agent.apis if api in (options.api or APIS)
              for task in options.task or TASKS]
    entries: list[dict[str, Any]] = []
    try:
        packages = {}
        for agent in chosen:
            say(f"npm: {agent.package} {agent.version}")
            packages[agent.name] = install(agent, cache)
        node = subprocess.run(["node", "--version"], text=True, capture_output=True, check=True).stdout.strip()
        leave_network()
        with tempfile.TemporaryDirectory(prefix="agents-") as made:
            recorded = Path(made, "requests")
            say("the server starts")
            with own_server(Path(made), recorded) as (base, manifest):
                for agent, api, task in wanted:
                    say(f"{agent.name}, {api}, {task}")
                    entry, seen = run(agent, api, task, base, cache, recorded)
                    entries.append(entry)
                    say("")
                    print(f"{agent.name:10s} {api:10s} {task:6s} {entry['seconds']:6.1f} s "
                          f"{len(seen.requests)} requests {entry['outcome']}", flush=True)
                    if options.bodies:
                        with options.bodies.open("a", encoding="utf-8") as file:
                            file.writelines(json.dumps({"agent": agent.name, "api": api, "task": task, **request},
                                                       ensure_ascii=False) + "\n" for request in seen.requests)
    except (NothingRuns, OSError, subprocess.SubprocessError) as error:
        say("")
        print(f"agent_roundtrip: {error}", file=sys.stderr)
        return 1
    words = [Path(sys.argv[0]).name, *(sys.argv[1:] if arguments is None else arguments)]
    path = bench_record.keep("agent-roundtrip", {
        "kind": "agent-roundtrip", **state, "manifest": manifest, "machine": bench_record.machine(),
        "command": bench_record.without_paths(words), "node": node,
        "network": "a namespace of its own, loopback only", "packages": packages,
        "seconds": round(time.monotonic() - start, 1), "runs": entries}, options.out)
    print(f"kept as {path.name}")
    return 0 if all(entry["outcome"] == "ok" for entry in entries) else 1


if __name__ == "__main__":
    sys.exit(main())
