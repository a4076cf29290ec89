"""Starts our server over a checkpoint, as `make serve` does, and runs the acceptance program against it.

    python -m tests.acceptance.serve MODEL [--server-args "ARGS"] [--log FILE] [OPTIONS of tests.acceptance ...]

Exit status: the program's; 3 where the server does not start, or does not end as it should.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from tests.acceptance import program
from tests.helpers.server_process import ServerProcess, free_port

ROOT = Path(__file__).resolve().parents[2]
NO_SERVER = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.acceptance.serve", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", type=Path, help="folder of the checkpoint")
    parser.add_argument("--server-args", default="", metavar="ARGS", help="further options of the server, in one word")
    parser.add_argument("--log", type=Path, default=ROOT / ".cache/acceptance/server.log", metavar="FILE",
                        help="what the server writes (default .cache/acceptance/server.log)")
    args, others = parser.parse_known_args()
    # What is wrong with these is said before a server is started for them.
    if program.parsed(["--base-url", str(ROOT), *others]).base_url != str(ROOT):
        parser.error("--base-url is of the server that this starts; of another one: python -m tests.acceptance")
    args.log.parent.mkdir(parents=True, exist_ok=True)
    port = free_port()
    environment = {**os.environ, "PYTHON": sys.executable, "NAME": "llm", "HOST": "127.0.0.1", "PORT": str(port)}
    command = ["bash", ROOT / "requirements/serve.sh", args.model, *shlex.split(args.server_args)]
    print(f"starting the server over {args.model}; its log: {args.log}", flush=True)
    server = ServerProcess(command, port, args.log, environment)
    status, ended = NO_SERVER, 0
    try:
        server.wait_until_ready()
        status = program.main(["--base-url", server.base, *others])
    except AssertionError as error:
        print(f"acceptance: {error}", file=sys.stderr)
    finally:
        ended = server.end(ask=True)
    if ended and status != NO_SERVER:
        print(f"acceptance: the server ended with {ended}:\n{server.output()[-3000:]}", file=sys.stderr)
        return NO_SERVER
    return status


if __name__ == "__main__":
    sys.exit(main())
