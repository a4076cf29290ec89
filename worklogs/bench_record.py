"""What every record of a benchmark holds beside its figures, and how it is kept: once, under its time and name."""
import datetime
import hashlib
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "remote_results"
NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
AMX = ("amx_tile", "amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx2")


def machine() -> dict[str, Any]:
    """Processor, its flags that decide about matrix speed, memory; nothing that names this very machine."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        info = ""
    model = re.search(r"^model name\s*: (.*)$", info, re.MULTILINE)
    flags = re.search(r"^flags\s*: (.*)$", info, re.MULTILINE)
    there = set(flags.group(1).split()) if flags else set()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"cores": os.cpu_count(), "processor": model.group(1) if model else platform.machine(),
            "flags": [flag for flag in AMX if flag in there], "memory_gib": round(pages / 2**30, 1),
            "python": platform.python_version()}


def commit() -> dict[str, Any]:
    """This working tree: commit, and whether deployed files or these programs differ from it."""
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, text=True, capture_output=True).stdout.strip()
    return {"commit": git("rev-parse", "HEAD"),
            "changed": bool(git("status", "--porcelain", "--", "vllm_overrides", "patches", "worklogs/*.py"))}


def without_paths(words: list[str]) -> str:
    """A command line whose absolute paths are cut to their last part."""
    return " ".join(re.sub(r"(?<![\w.:/])/(?:[^\s/=,:]+/)*([^\s/=,:]*)", r"\1", word) for word in words)


def digest(value: Any) -> str:
    """SHA-256 (16 hex digits) of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def keep(name: str, record: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Writes a record as folder/<UTC date-time>_<name>.json, and never over another: where there is one of this
    second, in the next one.

    Raises:
        ValueError: the name is no lower-case word of letters, digits, dots and dashes.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"the name {name!r} of a result is not made of lower-case letters, digits, dots and dashes")
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        now = datetime.datetime.now(datetime.timezone.utc)
        path = folder / f"{now:%Y%m%d-%H%M%S}_{name}.json"
        try:
            with open(path, "x", encoding="utf-8") as file:
                json.dump({"kind": record["kind"], "utc": now.isoformat(timespec="seconds"), **record}, file, indent=1)
                file.write("\n")
            return path
        except FileExistsError:
            time.sleep(1 - now.microsecond / 1e6)


def keep_of_server(kind: str, server: str, said: Any, version: str, command: str, found: Mapping[str, Any],
                   folder: Path = RESULTS) -> Path:
    """Keeps what was found of a server that somebody else has started, under the kind's and the server's name.

    Args:
        server: which one it is. said: what it says of itself, whose "version" counts more than ``version``.
        command: how it was started.
    """
    version = said.get("version") or version if isinstance(said, dict) else version
    return keep(f"{kind}-{server}", {"kind": kind, **found, "server": server, "version": version, **commit(),
                                     "machine": machine(), "server_command": without_paths(command.split())}, folder)
