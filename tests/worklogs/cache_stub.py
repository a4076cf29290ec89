"""A server with a prefix cache that is known exactly: it finds whole blocks of what it has seen, and can be told to
find less, to fail, or to say nothing of its cache."""
import http.server
import json
import threading


class CacheStub(http.server.ThreadingHTTPServer):
    """block: tokens of which only multiples are found. silent: no cached count. fail_after: completions that are
    answered; the later ones get a 500."""

    daemon_threads = True

    def __init__(self, block: int = 16, silent: bool = False, fail_after: int = 1 << 30) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.block, self.silent, self.fail_after = block, silent, fail_after
        self.bodies: list[dict] = []
        self._seen: set[tuple[int, ...]] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def cached(self, ids: list[int]) -> int:
        """What is found of a prompt, which is known from now on."""
        with self._lock:
            ends = range(self.block, len(ids), self.block)
            found = max((end for end in ends if tuple(ids[:end]) in self._seen), default=0)
            self._seen.update(tuple(ids[:end]) for end in ends)
            return found


class _Handler(http.server.BaseHTTPRequestHandler):
    server: CacheStub

    def do_GET(self) -> None:
        self._answer(200, {"version": "stub"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if len(self.server.bodies) > self.server.fail_after:
            self._answer(500, {"error": "told to fail"})
            return
        ids, cached = body["prompt"], self.server.cached(body["prompt"])
        found = {"choices": [{"text": "x"}], "usage": {"prompt_tokens": len(ids)}}
        if not self.server.silent:
            found["usage"]["prompt_tokens_details"] = {"cached_tokens": cached}
            found["timings"] = {"cache_n": cached + 1}
        self._answer(200, found)

    def _answer(self, status: int, value: dict) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass
