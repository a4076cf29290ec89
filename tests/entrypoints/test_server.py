"""The real server over a tiny model: started once as `python -m vllm.entrypoints.openai.api_server`, asked as a new
user would."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

from tests.helpers.server_process import ServerProcess, free_port
from tests.helpers.tiny_models import make_qwen2
from tests.helpers.tokenizer import tokenizer_folder

CONTEXT = 4096
TOOLS = [{"type": "function",
          "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}]


def checkpoint(folder: Path, **sizes) -> Path:
    make_qwen2(folder, max_position_embeddings=CONTEXT, **sizes)
    for file in tokenizer_folder(small=479).iterdir():
        shutil.copy(file, folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.9, "top_k": 20}')
    return folder


def start(model: Path, log: Path, *arguments: str) -> ServerProcess:
    port = free_port()
    return ServerProcess([
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "llm",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", str(CONTEXT),
        "--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--enable-chunked-prefill", "--enable-prefix-caching",
        "--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder", "--reasoning-parser", "qwen3",
        "--num-gpu-blocks-override", "1024", "--engine-restarts", "1", *arguments], port, log)


def engine_pid(server: ServerProcess) -> int:
    return int(re.findall(r"engine process (\d+)", server.output())[-1])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    started = start(checkpoint(folder / "model"), folder / "log")
    yield started.wait_until_ready()
    started.process.kill()


def test_one_line_says_what_runs(server):
    lines = [line for line in server.output().splitlines() if line.startswith("vllm overlay: ")]
    assert len(lines) == 1, lines
    deployed, _, back_ends = lines[0].partition("; back ends: ")
    assert re.fullmatch(r"vllm overlay: pin \S+, \d+ overlays, manifest [0-9a-f]{12}", deployed), lines
    assert back_ends.startswith("attention torch-paged, causal_conv1d native, gated_delta_rule native, "), lines
    before = server.output().partition(lines[0])[0]
    assert "engine process" not in before, "the line comes before the engine, and so before the model"


def test_the_printed_command_works(server):
    command = re.search(r"^curl .*$", server.output(), re.MULTILINE)
    assert command, server.output()
    if shutil.which("curl") is None:
        pytest.skip("no curl on this machine")
    done = subprocess.run(["bash", "-c", command.group() + " -s"], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["object"] == "chat.completion", done.stdout + done.stderr


def test_small_endpoints(server):
    assert server.get("/health").status_code == 200
    model, = server.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("llm", CONTEXT)
    version = server.get("/version")
    # By this content type the platform's harness knows what kind of server it has before it.
    assert "version" in version.json() and version.headers["content-type"] == "application/json"
    assert "vllm:num_requests_running" in server.get("/metrics").text
    for path in ("/get_model_info", "/get_server_info"):
        assert server.get(path).status_code == 404


def test_whole_and_streamed_are_the_same(server):
    request = {"temperature": 0, "max_tokens": 40, "messages": [{"role": "user", "content": "中文测试 🎉 and words"}]}
    whole = server.post(**request).json()
    message = whole["choices"][0]["message"]
    assert whole["usage"]["completion_tokens"] == 40 and whole["choices"][0]["finish_reason"] == "length", whole
    api = openai.OpenAI(base_url=server.url("/v1"), api_key="none")
    chunks = list(api.chat.completions.create(model="llm", stream=True, stream_options={"include_usage": True},
                                              **request))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or ""
                   for delta in deltas) == message.get("reasoning_content", "")
    assert "".join(delta.content or "" for delta in deltas) == (message["content"] or "")
    assert chunks[-1].usage.completion_tokens == 40
    assert chunks[-1].usage.prompt_tokens == whole["usage"]["prompt_tokens"]
    assert len(deltas) > 10, "the stream came in one piece"


def test_completions(server):
    request = {"temperature": 0, "max_tokens": 12, "prompt": "Once upon a time"}
    whole = server.post("/v1/completions", **request).json()
    text = server.post("/v1/completions", stream=True, **request).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    scored = server.post("/v1/completions", logprobs=2, echo=True, **request).json()["choices"][0]["logprobs"]
    assert len(scored["tokens"]) == whole["usage"]["total_tokens"] and scored["token_logprobs"][0] is None
    assert all(value <= 0 for value in scored["token_logprobs"][1:])


def test_a_long_prompt_in_pieces(server):
    """Many times the tokens of one step: the usage counts each token once, and no empty chunk is sent meanwhile."""
    long = [{"role": "user", "content": "word " * 900}]
    whole = server.post(messages=long, max_tokens=5, temperature=0).json()
    assert whole["usage"]["completion_tokens"] == 5 and whole["usage"]["prompt_tokens"] > 900, whole["usage"]
    text = server.post(messages=long, max_tokens=5, temperature=0, stream=True,
                       stream_options={"include_usage": True}).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    usage = {name: chunks[-1]["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    assert usage == {name: whole["usage"][name] for name in usage}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert all(any(delta.values()) for delta in deltas[1:-1]), deltas


def test_several_at_once_and_several_choices(server):
    """Greedy answers do not depend on company; n choices of one greedy request are equal."""
    prompts = [f"Number {i}: " + "x" * i for i in range(12)]
    request = {"temperature": 0, "max_tokens": 10}
    alone = [server.post("/v1/completions", prompt=prompt, **request).json()["choices"][0]["text"]
             for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda prompt: server.post("/v1/completions", prompt=prompt, **request).json(),
                                 prompts))
    assert [body["choices"][0]["text"] for body in together] == alone
    several = server.post("/v1/completions", prompt=prompts[3], n=3, **request).json()
    assert [choice["text"] for choice in several["choices"]] == [alone[3]] * 3
    assert several["usage"]["completion_tokens"] == 30


def test_seeds(server):
    texts = [server.post(seed=seed, temperature=1.5, max_tokens=20).json()["choices"][0]["message"]
             for seed in (42, 42, 43)]
    assert texts[0] == texts[1] != texts[2]


def test_min_tokens_and_ignore_eos(server):
    body = server.post(min_tokens=300, max_tokens=300, ignore_eos=True, temperature=1.0).json()
    assert body["usage"]["completion_tokens"] == 300


def test_forced_call(server):
    """A random model under a named choice writes the call that its grammar leaves it, behind a thought."""
    body = server.post(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "f"}}, max_tokens=60,
                       thinking_token_budget=5).json()
    assert body["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f", body


def test_a_client_that_leaves_frees_the_engine(server):
    """Its request is gone from the engine's count at once, long before its 3,000 tokens are done."""
    with httpx.stream("POST", server.url("/v1/chat/completions"), timeout=30, json={
            "model": "llm", "stream": True, "max_tokens": 3000, "ignore_eos": True,
            "messages": [{"role": "user", "content": "go"}]}) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 10
    while "client gone" not in server.output():
        assert time.monotonic() < deadline, server.output()[-2000:]
        time.sleep(0.02)
    line = next(line for line in server.output().splitlines() if "client gone" in line)
    logged = json.loads(line[line.index("{"):])
    assert logged["completion_tokens"] < 1500, logged


def test_bad_input(server):
    for path, body, word in (("/v1/chat/completions", {"max_tokens": -1}, "max_tokens"),
                             ("/v1/chat/completions", {"max_tokens": CONTEXT + 1}, str(CONTEXT)),
                             ("/v1/completions", {"prompt": "word " * 5000}, "maximum context length"),
                             ("/v1/chat/completions", {"messages": []}, "messages"),
                             ("/v1/chat/completions", {"response_format": {"type": "xml"}}, "response_format.type")):
        response = server.post(path, **body)
        assert response.status_code == 400 and word in response.json()["error"]["message"], response.text
    assert server.post().status_code == 200


def ask_and_kill(server):
    """The rest of a stream whose engine is killed."""
    with httpx.stream("POST", server.url("/v1/chat/completions"), timeout=30, json={
            "model": "llm", "stream": True, "max_tokens": 3000, "ignore_eos": True,
            "messages": [{"role": "user", "content": "go"}]}) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(engine_pid(server), signal.SIGKILL)
        return [line for line in lines if line]


def metric(server, name):
    return sum(float(line.split()[-1]) for line in server.get("/metrics").text.splitlines()
               if re.match(rf"{name}[ {{]", line))


def test_the_engine_dies(server):
    """Who waits is told; the next one waits for another engine, and whoever asks for its health hears of it."""
    first, generated = engine_pid(server), metric(server, "vllm:generation_tokens_total")
    rest = ask_and_kill(server)
    error = json.loads(rest[-2].removeprefix("data: "))["error"]
    assert error["code"] == "engine_lost" and error["type"] == "server_error" and rest[-1] == "data: [DONE]", rest[-5:]
    assert re.search(r"on request chatcmpl-\w{32}: the engine process .*was killed by signal 9", error["message"])
    health = server.get("/health")
    assert health.status_code == 503 and "being started again" in health.json()["error"]["message"], health.text
    assert server.get("/v1/models").status_code == 200
    answer = server.post(max_tokens=5, ignore_eos=True)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 5
    assert server.get("/health").status_code == 200
    assert engine_pid(server) != first and not Path(f"/proc/{first}").exists()
    assert metric(server, "vllm:engine_restarts_total") == 1
    assert metric(server, "vllm:num_requests_running") == 0, "of the engine that was killed"
    deadline = time.monotonic() + 10
    while metric(server, "vllm:generation_tokens_total") <= generated:      # Counted by the next engine as well.
        assert time.monotonic() < deadline, f"{generated} before"
        time.sleep(0.1)


def test_the_engine_dies_once_more_than_it_may(server):
    """The server ends with a line that says why; a supervisor can start it again."""
    rest = ask_and_kill(server)
    assert "engine_lost" in rest[-2] and rest[-1] == "data: [DONE]", rest[-5:]
    assert server.end() == 1
    # Python's own tracker may complain, after us, about what the killed process left.
    last = [line for line in server.output().splitlines()[-5:] if line.startswith("vllm: error: ")]
    reason = (r"the engine is gone: the engine process .*was killed by signal 9.*"
              "it has been started again 1 times within 3600 s$")
    assert last and re.search(reason, last[0]), server.output()[-2000:]
