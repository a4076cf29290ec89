"""Hugging Face's `generate` behind POST /v1/chat/completions (streamed) and /v1/completions: transformers as a server,
to be measured.

    python worklogs/peers/transformers_server.py CHECKPOINT --port 8077 [--dtype bfloat16]

One request at a time, text only, no prefix cache, so none is reported. Prompts of chats are rendered by our server's
own code (bench/served.py): they are the same token ids. Those of completions are token ids. An event per token, all of
it as content, thoughts and calls included; usage counts what was generated, the end token too. It knows max_tokens,
min_tokens, ignore_eos, temperature (0 is greedy), top_p, top_k and seed, with the checkpoint's own defaults, and
ignores the rest.

Prints `Ready: URL`; /health answers from then on. Ends with SIGTERM or SIGINT.
"""
import argparse
import contextlib
import http.server
import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch  # noqa: E402
import transformers  # noqa: E402
from bench.served import Served, ServedError  # noqa: E402
from transformers.generation.streamers import BaseStreamer  # noqa: E402

NO_END = 2048       # Tokens, where a request says nothing.


class Gone(Exception):
    """The client has closed its connection."""


class Deltas(BaseStreamer):
    """Gives every token to `write` as the text that it completes."""

    def __init__(self, tokenizer: Any, write: Any) -> None:
        self._tokenizer, self._write = tokenizer, write
        self._prompt = True
        self._waiting: list[int] = []
        self.count = 0

    def put(self, value: torch.Tensor) -> None:
        """value: the prompt's ids first, then one id at a time."""
        if self._prompt:
            self._prompt = False
            return
        self.count += 1
        self._waiting.append(int(value.reshape(-1)[-1]))
        text = self._tokenizer.decode(self._waiting, skip_special_tokens=True)
        if not text.endswith("\ufffd"):     # Else a character that is not complete.
            self._waiting = []
            self._write(text)

    def end(self) -> None:
        """Nothing comes any more."""
        if self._waiting:
            self._write(self._tokenizer.decode(self._waiting, skip_special_tokens=True))


class Model:
    """A checkpoint. One request at a time may generate, and one may be rendered."""

    def __init__(self, folder: Path, dtype: str) -> None:
        """Raises:
            ServedError, OSError, ValueError: it cannot be loaded.
        """
        self.served = Served(folder)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        kind = transformers.AutoModelForImageTextToText if hasattr(config, "vision_config") else (
            transformers.AutoModelForCausalLM)
        self.model = kind.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True).eval()
        self.lock, self.rendering = threading.Lock(), threading.Lock()

    def settings(self, body: dict[str, Any]) -> dict[str, Any]:
        """What `generate` is told of a request."""
        most = body.get("max_completion_tokens") or body.get("max_tokens") or NO_END
        found: dict[str, Any] = {"max_new_tokens": most}
        if body.get("ignore_eos"):
            found["eos_token_id"] = None
            found["min_new_tokens"] = most
        elif body.get("min_tokens"):
            found["min_new_tokens"] = body["min_tokens"]
        if body.get("temperature") == 0:
            found |= {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        else:
            found |= {name: body[name] for name in ("temperature", "top_p", "top_k") if body.get(name) is not None}
        return found

    def generate(self, ids: list[int], body: dict[str, Any], deltas: Deltas) -> int:
        """The last token's id. Waits for its turn."""
        with self.lock, torch.inference_mode():
            if isinstance(body.get("seed"), int):
                torch.manual_seed(body["seed"])
            prompt = torch.tensor([ids])
            out = self.model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), streamer=deltas,
                                      **self.settings(body))
        return int(out[0, -1])

    def ends(self, token: int) -> bool:
        """Whether a token ends an answer."""
        found = self.model.generation_config.eos_token_id
        return token in (found if isinstance(found, list) else [found])


class Handler(http.server.BaseHTTPRequestHandler):
    """The routes."""

    protocol_version = "HTTP/1.1"
    model: Model

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        found = {"/health": {}, "/version": {"version": transformers.__version__},
                 "/v1/models": {"object": "list", "data": [{"id": "llm", "object": "model"}]}}
        self._answer(200, found[self.path]) if self.path in found else self._answer(404, _error("no such route"))

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path not in ("/v1/chat/completions", "/v1/completions"):
            self._answer(404, _error("no such route"))
            return
        try:
            body = json.loads(data)
            ids = self._chat(body) if self.path == "/v1/chat/completions" else _token_ids(body)
        except (ValueError, AttributeError, ServedError) as error:
            self._answer(400, _error(str(error)))
            return
        if body.get("stream"):
            self._stream(ids, body)
        else:
            self._whole(ids, body)

    def _chat(self, body: dict[str, Any]) -> list[int]:
        """The prompt of a chat."""
        if not body.get("stream"):
            raise ValueError("only streamed chats: stream must be true")
        with self.model.rendering:
            ids = self.model.served.render(body).ids
        if any(part.get("type") not in (None, "text") for message in body["messages"]
               if isinstance(message.get("content"), list) for part in message["content"]):
            raise ValueError("text only")
        return ids

    def _whole(self, ids: list[int], body: dict[str, Any]) -> None:
        """A completion in one piece."""
        texts: list[str] = []
        deltas = Deltas(self.model.tokenizer, texts.append)
        try:
            last = self.model.generate(ids, body, deltas)
        except Exception as error:
            print(f"transformers_server: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            self._answer(500, _error(f"{type(error).__name__}: {error}"))
            return
        self._answer(200, {"id": "answer", "object": "text_completion", "model": "llm", "usage": _usage(ids, deltas),
                           "choices": [_piece(False, "".join(texts), self._finish(last, body))]})

    def _stream(self, ids: list[int], body: dict[str, Any]) -> None:
        chat = self.path == "/v1/chat/completions"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        deltas = Deltas(self.model.tokenizer, lambda text: self._event(choices=[_piece(chat, text)]))
        try:
            if chat:
                self._event(choices=[_choice({"role": "assistant", "content": ""})])
            last = self.model.generate(ids, body, deltas)
            self._event(choices=[_piece(chat, "", self._finish(last, body))])
            if (body.get("stream_options") or {}).get("include_usage"):
                self._event(choices=[], usage=_usage(ids, deltas))
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")
        except Gone:
            self.close_connection = True
        except Exception as error:
            # The status is sent already.
            print(f"transformers_server: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            self._event(**_error(f"{type(error).__name__}: {error}"))
            self._chunk(b"")

    def _finish(self, last: int, body: dict[str, Any]) -> str:
        return "stop" if self.model.ends(last) and not body.get("ignore_eos") else "length"

    def _event(self, **fields: Any) -> None:
        self._chunk(f"data: {json.dumps({'id': 'answer', 'object': 'chat.completion.chunk', 'model': 'llm', **fields})}"
                    "\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        try:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()
        except OSError as error:
            raise Gone from error

    def _answer(self, status: int, found: dict[str, Any]) -> None:
        data = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _choice(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish}


def _piece(chat: bool, text: str, finish: str | None = None) -> dict[str, Any]:
    """A choice with some text of the answer, in the form of its route."""
    return _choice({"content": text} if text else {}, finish) if chat else {
        "index": 0, "text": text, "finish_reason": finish}


def _usage(ids: list[int], deltas: Deltas) -> dict[str, int]:
    return {"prompt_tokens": len(ids), "completion_tokens": deltas.count, "total_tokens": len(ids) + deltas.count}


def _token_ids(body: dict[str, Any]) -> list[int]:
    """The prompt of a completion.

    Raises:
        ValueError: it is no list of token ids.
    """
    ids = body.get("prompt")
    if not isinstance(ids, list) or not ids or not all(isinstance(token, int) for token in ids):
        raise ValueError("prompt must be a list of token ids")
    return ids


def _error(words: str) -> dict[str, Any]:
    return {"error": {"message": words, "type": "error"}}


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--port", type=int, default=8077)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        Handler.model = Model(options.checkpoint, options.dtype)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
        server.daemon_threads = True
    except (OSError, ValueError, ServedError) as error:
        print(f"transformers_server: {error}", file=sys.stderr)
        return 1
    print(f"Ready: http://127.0.0.1:{server.server_address[1]}", flush=True)
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(Handler.model.served), server:
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
