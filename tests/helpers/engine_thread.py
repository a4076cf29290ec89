"""An engine that normally has its own process, served from a thread of the test, which can reach into it."""
import threading
from typing import Any


def serve_in_thread(server: Any) -> tuple[threading.Event, threading.Thread]:
    """Starts an MQLLMEngine. Once the returned event is set it ends as by Ctrl-C, and the returned thread with it."""
    stop, alive = threading.Event(), server._alive

    def until_stopped() -> None:
        alive()
        if stop.is_set():
            raise KeyboardInterrupt

    server._alive = until_stopped
    thread = threading.Thread(target=server.start, daemon=True)
    thread.start()
    return stop, thread
