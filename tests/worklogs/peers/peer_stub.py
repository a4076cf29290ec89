"""A server without a model, as bench_peers.py asks one: prompts of token ids and chats, at a speed that it is told.

    python peer_stub.py PORT MS_PER_PROMPT_TOKEN MS_PER_STEP ORDER NAME [broken] [--leaves-after REQUESTS]

It remembers prompts and reports what it knew of one, has an engine of its own that does nothing, tells what it has put
aside as our server does, and notes its start and end in the file ORDER.
"""
import asyncio
import json
import os
import signal
import subprocess
import sys
import time

from aiohttp import web

FRONT_S = 0.03
ENGINE = "import time; time.sleep(600)  # EngineCore"


class Stub:
    def __init__(self, per_token: float, per_step: float, most: float) -> None:
        self.per_token, self.per_step, self.most = per_token, per_step, most
        self.known: set[tuple[int, ...]] = set()
        self.computing = asyncio.Lock()

    async def prefill(self, ids: list[int]) -> int:
        """Cached tokens."""
        cached = next((length for length in range(len(ids), 0, -1) if tuple(ids[:length]) in self.known), 0)
        async with self.computing:
            await asyncio.sleep(self.per_token / 1000 * (len(ids) - cached))
        self.known.add(tuple(ids))
        return cached

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.most -= 1
        if self.most < 0:
            os._exit(1)
        chat = "messages" in body
        ids = [hash(word) for one in body["messages"] for word in one["content"].split()] if chat else body["prompt"]
        cached = await self.prefill(ids)
        count = body["max_tokens"]
        if chat:
            until = time.process_time() + FRONT_S
            while time.process_time() < until:
                pass
        usage = {"prompt_tokens": len(ids), "completion_tokens": count, "prompt_tokens_details": {
            "cached_tokens": cached}}
        timings = {"cache_n": cached}
        if not body.get("stream"):
            await asyncio.sleep(self.per_step / 1000 * (count - 1))
            return web.json_response({"usage": usage, "timings": timings, "choices": [{"text": "word " * count}]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(count):
            if number:
                await asyncio.sleep(self.per_step / 1000)
            finish = "length" if number == count - 1 else None
            text = {"delta": {"content": "word "}} if chat else {"text": "word "}
            await self.send(response, {"id": "x", "choices": [{"index": 0, "finish_reason": finish, **text}]})
        await self.send(response, {"id": "x", "choices": [], "usage": usage, "timings": timings})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def send(self, response: web.StreamResponse, found: dict) -> None:
        await response.write(f"data: {json.dumps(found)}\n\n".encode())


async def serve(port: int, stub: Stub) -> None:
    async def said(request: web.Request) -> web.Response:
        return web.json_response({"version": "stub", "data": [{"id": "llm"}]})

    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.post("/v1/completions", stub.answer), web.post("/v1/chat/completions", stub.answer),
                    web.get("/health", said), web.get("/version", said), web.get("/v1/models", said)])
    runner = web.AppRunner(app, shutdown_timeout=0.2)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    await runner.cleanup()


def main() -> None:
    port, per_token, per_step, order, name = sys.argv[1:6]
    beside = sys.argv[6:]
    most = float(beside[beside.index("--leaves-after") + 1]) if "--leaves-after" in beside else float("inf")
    if "broken" in beside:
        sys.exit("it is broken")

    def say(words: str) -> None:
        with open(order, "a") as file:
            file.write(f"{name} {words}{' ' + os.environ['QUANT'] if 'QUANT' in os.environ else ''}\n")

    say("starts")
    print("KV cache: 512 tokens, 0.50 GiB (a step needs 0.57 GiB beside it).\n"
          "Recurrent state: 16 slots of 6.14 MiB, 98.2 MiB in all.", flush=True)
    with subprocess.Popen([sys.executable, "-c", ENGINE]) as engine:
        asyncio.run(serve(int(port), Stub(float(per_token), float(per_step), most)))
        engine.terminate()
    say("ends")


if __name__ == "__main__":
    main()
