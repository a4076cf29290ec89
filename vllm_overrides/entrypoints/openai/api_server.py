"""Stock's server with the API, its start and its end from vllm.overlay.serving. Everything else is stock's.

Run as ``python -m vllm.entrypoints.openai.api_server``; the engine's process imports this file once more as
``__mp_main__``, so nothing here may have an effect on import.
"""

from typing import Any

from vllm.entrypoints.openai import api_server_stock as _stock
from vllm.overlay.serving.app import build_app, router
from vllm.overlay.serving.server import main, run_server

__all__ = ["build_app", "main", "router", "run_server"]


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)


if __name__ == "__main__":
    main()
