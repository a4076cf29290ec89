"""Stock's batch runner, started like the server: on a checked tree, its back ends announced.

Run as ``python -m vllm.entrypoints.openai.run_batch``.
"""
import asyncio
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai import run_batch_stock as _stock
from vllm.overlay.runtime.announced import announced
from vllm.overlay.runtime.startup_check import check_deployed
from vllm.overlay.serving.errors import StartError, one_line
from vllm.overlay.serving.server import back_ends, give_up, start_line


def run() -> None:
    """The program. Raises SystemExit, after one line on stderr, where the tree or the arguments are not in order."""
    args = _stock.parse_args()
    deployed = check_deployed()
    try:
        choices = back_ends(AsyncEngineArgs.from_cli_args(args).create_engine_config())
    except (StartError, ValueError, OSError) as error:
        give_up(one_line(error))
    print(start_line(deployed, choices), flush=True)
    if args.enable_metrics:
        _stock.start_http_server(port=args.port, addr=args.url)
    with announced(choices):
        asyncio.run(_stock.main(args))


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)


if __name__ == "__main__":
    run()
