"""The prefix cache as clients of a hybrid model meet it: what comes back is read off `usage` and /metrics."""
import concurrent.futures
import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter

import httpx
import pytest
from PIL import Image

from tests.helpers.picture_files import part

TOOLS = [{"type": "function", "function": {"name": "read", "description": "Reads a file", "parameters": {
    "type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}}}]
BLOCK = 16
# The most that a place between two blocks costs, and the most that a hit may lose.
LOST = 64


def words(seed: int, count: int) -> str:
    """Text of about `count` tokens that begins as no other seed's does."""
    rng = random.Random(seed)
    common = ("the", "cat", "sat", "on", "mat", "and", "then", "went", "home", "to", "read", "about", "cars", "old")
    return f"{rng.randrange(10**9)}: " + " ".join(rng.choice(common) for _ in range(count))


def cached(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def tokens(demo, **body) -> list[int]:
    """The token ids of a chat request's prompt."""
    response = httpx.post(demo.url("/tokenize"), json={"model": "llm", **body}, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["tokens"]


def common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def metrics(demo) -> Counter[str]:
    """Sums over labels, and each reason of a miss."""
    found: Counter[str] = Counter()
    for name, labels, value in re.findall(r"^vllm:(\w+)\{(.*)\} (\S+)$", demo.get("/metrics").text, re.MULTILINE):
        reason = re.search(r'reason="(\w+)"', labels)
        found[f"{name} {reason.group(1)}" if reason else name] += float(value)
    return found


def completion(demo, prompt: str, **fields) -> dict:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    response = demo.post("/v1/completions", **body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "no thinking"])
def test_a_conversation_that_grows(demo, thinking, tools):
    """By 20 to 500 tokens a turn, with questions and results of calls. A turn begins where the last one ended, if the
    template repeats what was there; else where the last message ended that it repeats."""
    rng = random.Random(f"{thinking} {bool(tools)}")
    messages = [{"role": "system", "content": words(rng.randrange(10**6), 60)},
                {"role": "user", "content": words(rng.randrange(10**6), 100)}]
    fields = {"tools": tools, "chat_template_kwargs": {"enable_thinking": thinking}}
    before: list[int] = []
    ends: list[int] = []
    kept = 0
    for turn in range(6):
        prompt = tokens(demo, messages=messages, **fields)
        answer = demo.ask(messages=messages, max_tokens=10, temperature=0, ignore_eos=True, **fields)
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        shared = common(before, prompt)
        if turn:
            end = max(end for end in ends if end <= shared)
            kept += shared == len(before)
            least = max(end - BLOCK, len(before) - LOST if shared == len(before) else 0)
            assert cached(answer) >= least, (
                f"turn {turn}: {cached(answer)} cached of {len(prompt)}; {shared} are those of the last prompt, which "
                f"had {len(before)}; its last question and message end at {ends}")
            assert cached(answer) <= shared
        before = prompt
        question = max(i for i, message in enumerate(messages) if message["role"] == "user")
        ends = [len(tokens(demo, messages=messages[:i + 1], add_generation_prompt=False, **fields))
                for i in {question, len(messages) - 1}]
        said = answer["choices"][0]["message"]
        grown = words(rng.randrange(10**6), rng.choice((20, 60, 250, 500)))
        if tools and turn % 3:
            call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": json.dumps({"path": "a"})}}
            messages = [*messages, {**said, "tool_calls": [call]},
                        {"role": "tool", "tool_call_id": "c", "content": grown}]
        else:
            messages = [*messages, said, {"role": "user", "content": grown}]
    print(f"{kept} of 5 turns repeat the whole prompt before them")


def test_another_question_in_the_middle(demo):
    """A conversation that came as a whole, and then again with another end, as when an agent goes back: it is found up
    to the end of the last message that is the same, to the block."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": words(800 + i, 45)} for i in range(9)]
    assert cached(demo.ask(messages=messages, max_tokens=1)) == 0
    found = {}
    for i in (2, 4, 6, 8):
        end = len(tokens(demo, messages=messages[:i], add_generation_prompt=False))
        answer = demo.ask(messages=[*messages[:i], {"role": "user", "content": words(850 + i, 30)}], max_tokens=1)
        found[end] = cached(answer)
    assert all(end - BLOCK < hit <= end + BLOCK for end, hit in found.items()), f"{found} (end: cached)"


@pytest.mark.parametrize("index", [0, 9, 13, 20, 27])
def test_the_second_time(demo, index):
    """The same prompt, of 20 to 1,700 tokens: as good as all of it, if it is long enough to be worth it."""
    text = words(900 + index, round(20 * 250**(index / 34)))
    first, second = completion(demo, text), completion(demo, text)
    length = first["usage"]["prompt_tokens"]
    assert cached(first) == 0
    assert length <= 80 or length - LOST <= cached(second) < length, f"{cached(second)} of {length}"
    assert first["choices"] == second["choices"]


def test_a_shared_beginning(demo):
    """The second prompt with it is the one that finds it, whatever follows."""
    beginning = words(2000, 700)
    one = completion(demo, f"{beginning} {words(2001, 50)}")
    two = completion(demo, f"{beginning} {words(2002, 300)}")
    assert cached(one) == 0 and cached(two) >= 700 - LOST, (cached(one), cached(two))


def test_four_at_once(demo):
    beginning = words(2500, 1000)
    before = metrics(demo)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda i: completion(demo, f"{beginning} {words(2501 + i, 30)}"), range(4)))
    computed = metrics(demo)["prompt_tokens_total"] - before["prompt_tokens_total"]
    assert sorted(map(cached, answers))[1] >= 1000 - LOST, list(map(cached, answers))
    assert computed < 1000 + 4 * (60 + LOST), f"{computed} tokens were computed for four prompts"


@pytest.mark.parametrize("chat", [True, False])
def test_several_samples(demo, chat):
    """Their prompt is computed once, and no part of it was cached; the second time it is."""
    text = words(3000 + chat, 600)
    before = metrics(demo)

    def ask() -> dict:
        if chat:
            return demo.ask(messages=[{"role": "user", "content": text}], n=4, max_tokens=4, seed=0)
        return completion(demo, text, n=4, temperature=1, seed=0)

    first = ask()
    computed = metrics(demo)["prompt_tokens_total"] - before["prompt_tokens_total"]
    length = first["usage"]["prompt_tokens"]
    assert len(first["choices"]) == 4 and cached(first) == 0
    assert computed <= length + 3 * LOST, f"{computed} tokens were computed for a prompt of {length}"
    second = ask()
    assert length - LOST <= cached(second) < length, (cached(second), length)


def test_equal_texts_and_different_pictures(demo):
    """Two tenants share what stands before the pictures, and nothing behind."""
    def ask(colour: tuple[int, int, int]) -> dict:
        content = [{"type": "text", "text": words(4000, 200)}, part(Image.new("RGB", (320, 320), colour)),
                   {"type": "text", "text": words(4001, 100)}]
        return demo.ask(messages=[{"role": "user", "content": content}], max_tokens=4, temperature=0, ignore_eos=True)

    red, blue, again = ask((255, 0, 0)), ask((0, 0, 255)), ask((255, 0, 0))
    length = red["usage"]["prompt_tokens"]
    text = len(tokens(demo, messages=[{"role": "user", "content": words(4000, 200)}], add_generation_prompt=False))
    assert cached(red) == 0
    assert text - LOST <= cached(blue) <= text, (cached(blue), text)
    assert length - LOST <= cached(again) < length, (cached(again), length)
    assert red["choices"][0]["message"] == again["choices"][0]["message"]


@pytest.mark.parametrize("path", ["chat", "completions"])
def test_streams_say_the_same(demo, path):
    text = words(5000 + len(path), 300)
    fields = {"messages": [{"role": "user", "content": text}]} if path == "chat" else {"prompt": text}
    path = "/v1/chat/completions" if path == "chat" else "/v1/completions"
    counts = []
    for _ in range(2):
        chunks = demo.post(path, stream=True, stream_options={"include_usage": True}, **fields).text.split("\n\n")
        last = json.loads(chunks[-3].removeprefix("data: "))
        counts.append(cached(last))
    whole = demo.post(path, **fields).json()
    assert counts == [0, cached(whole)] and cached(whole) >= 300 - LOST, (counts, whole["usage"])


class Responses:
    """/v1/responses, as an agent speaks it: what came back is sent again."""
    path, thinking = "/v1/responses", True

    @staticmethod
    def question(text: str) -> dict:
        return {"type": "message", "role": "user", "content": text}

    @staticmethod
    def body(history: list[dict]) -> dict:
        return {"instructions": "Be brief.", "input": history, "max_output_tokens": 10}

    @staticmethod
    def said(answer: dict) -> list[dict]:
        return answer["output"]

    @staticmethod
    def counts(usage: dict) -> tuple[int, int]:
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"], usage
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]

    @staticmethod
    def of_stream(events: list[dict]) -> list[dict]:
        return [events[-1]["response"]["usage"]]


class Messages:
    """/v1/messages; its input_tokens are those that were computed."""
    path, thinking = "/v1/messages", False

    @staticmethod
    def question(text: str) -> dict:
        return {"role": "user", "content": [{"type": "text", "text": text}]}

    @staticmethod
    def body(history: list[dict]) -> dict:
        return {"system": "Be brief.", "messages": history, "max_tokens": 10}

    @staticmethod
    def said(answer: dict) -> list[dict]:
        return [{"role": "assistant", "content": answer["content"]}]

    @staticmethod
    def counts(usage: dict) -> tuple[int, int]:
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]

    @staticmethod
    def of_stream(events: list[dict]) -> list[dict]:
        return [events[0]["message"]["usage"], events[-2]["usage"]]


@pytest.mark.parametrize("api", [Responses, Messages])
def test_the_other_apis(demo, api):
    """A prompt that was seen before, whole and streamed; then the conversation grows: each turn begins where the last
    one's question ended, although the template goes on differently there. Its first prompt is chat's."""
    def ask(history: list[dict], **fields) -> httpx.Response:
        body = {"model": "llm", **api.body(history), "temperature": 0, "ignore_eos": True, **fields}
        response = httpx.post(demo.url(api.path), json=body, timeout=60)
        assert response.status_code == 200, response.text
        return response

    seed = 9000 if api is Responses else 9100
    history = [api.question(words(seed, 300))]
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": words(seed, 300)}],
            "chat_template_kwargs": {"enable_thinking": api.thinking}}
    length = len(tokens(demo, **chat))
    behind = length - len(tokens(demo, **chat, add_generation_prompt=False))
    first, again = (ask(history).json() for _ in range(2))
    assert api.counts(first["usage"]) == (length, 0)
    prompt, hit = api.counts(again["usage"])
    assert prompt == length and length - LOST <= hit < length, (hit, length)
    assert [{**item, "id": None} for item in api.said(again)] == [{**item, "id": None} for item in api.said(first)]
    text = ask(history, stream=True).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line.startswith("data: {")]
    assert [api.counts(usage) for usage in api.of_stream(events)] == [(length, hit)] * len(api.of_stream(events)), text
    answer = first
    for turn, count in enumerate((20, 250, 60), start=1):
        end = api.counts(answer["usage"])[0] - behind
        history = [*history, *api.said(answer), api.question(words(seed + turn, count))]
        answer = ask(history).json()
        prompt, hit = api.counts(answer["usage"])
        assert prompt > end + count and end - BLOCK <= hit < prompt - count, (
            f"turn {turn}: {hit} cached of {prompt}; the last question ends at {end}")


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}], ids=["field", "echo"])
def test_prompt_logprobs_are_of_tokens_that_were_computed(demo, fields):
    text = words(6000, 100)
    plain = [completion(demo, text) for _ in range(2)]
    assert cached(plain[1]) > 0
    before = metrics(demo)
    whole = completion(demo, text, **fields)
    assert cached(whole) == 0
    choice = whole["choices"][0]
    found = choice["prompt_logprobs"] or choice["logprobs"]["token_logprobs"]
    assert len(found) >= whole["usage"]["prompt_tokens"] and None not in found[1:]
    after = metrics(demo)
    name = "prefix_cache_misses_total prompt_logprobs"
    assert after[name] - before[name] == 1, after
    assert cached(completion(demo, text)) == cached(plain[1]), "and what was cached stays"


def test_metrics_are_the_sums_of_usage(demo):
    before = metrics(demo)
    answers = [completion(demo, words(7000 + i // 2, 150)) for i in range(6)]
    answers.append(demo.ask(messages=[{"role": "user", "content": "Hi"}], max_tokens=1))
    gone = metrics(demo)
    gone.subtract(before)
    assert gone["prefix_cache_queries_total"] == sum(answer["usage"]["prompt_tokens"] for answer in answers)
    assert gone["prefix_cache_hits_total"] == sum(map(cached, answers)) > 0
    misses = {name: count for name, count in gone.items() if name.startswith("prefix_cache_misses") and count}
    assert sum(misses.values()) == sum(not cached(answer) for answer in answers), misses
    assert gone["state_checkpoints_hit_total"] == sum(map(bool, map(cached, answers)))
    assert gone["state_checkpoints_taken_total"] >= 3
    now = metrics(demo)
    assert now["state_checkpoint_slots"] > 0 and now["state_checkpoint_failures_total"] == 0
    assert now["state_checkpoint_bytes"] / now["state_checkpoint_slots"] > 10_000, "bytes of one state"
    rate = now["prefix_cache_hits_total"] / now["prefix_cache_queries_total"]
    assert now["gpu_prefix_cache_hit_rate"] == pytest.approx(rate)
    counters = [name for name in now if name.split()[0].endswith("_total")]
    assert all(now[name] >= before[name] for name in counters), "a counter fell"


def test_reset(demo):
    """All is forgotten when the answer comes; who runs goes on, and leaves nothing behind that was known before."""
    text = words(8000, 400)
    assert cached(completion(demo, text)) == 0 < cached(completion(demo, text))
    running = words(8001, 300)
    whole = completion(demo, running, max_tokens=40)
    begun = threading.Event()
    deltas = []

    def read() -> str:
        body = {"model": "llm", "prompt": running, "max_tokens": 40, "temperature": 0, "ignore_eos": True,
                "stream": True}
        with httpx.stream("POST", demo.url("/v1/completions"), json=body, timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    deltas.append(json.loads(line[6:])["choices"][0]["text"])
                    begun.set()
        return "".join(deltas)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        assert begun.wait(60)
        done = httpx.post(demo.url("/reset_prefix_cache"), timeout=60)
        assert (done.status_code, done.content) == (200, b""), done.text
        assert reading.result() == whole["choices"][0]["text"]
    assert cached(completion(demo, text)) == 0
    after = httpx.post(demo.url("/reset_prefix_cache"), timeout=60)
    assert after.status_code == 200
    assert metrics(demo)["state_checkpoint_slots"] == 0
    assert cached(completion(demo, text)) == 0 < cached(completion(demo, text))


def test_killed_while_prefixes_are_cached(demo):
    """An engine that is lost takes its cache along: the same prompt is computed once more, and then cached again; its
    tokens are the same each time. A reset that comes meanwhile is answered when there is an engine again."""
    text = words(10_000, 400)
    fields = {"max_tokens": 12, "return_token_ids": True}
    first, known = completion(demo, text, **fields), completion(demo, text, **fields)
    length = first["usage"]["prompt_tokens"]
    assert cached(first) == 0 and length - LOST <= cached(known) < length, (cached(known), length)
    before = metrics(demo)
    assert before["state_checkpoint_slots"] > 0
    os.kill(int(re.findall(r"engine process (\d+)", demo.output())[-1]), signal.SIGKILL)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        # Before anybody can have noticed.
        reset = pool.submit(httpx.post, demo.url("/reset_prefix_cache"), timeout=240)
        deadline = time.monotonic() + 20
        while demo.get("/health").status_code == 200:
            assert time.monotonic() < deadline, "nobody has noticed"
            time.sleep(0.05)
        assert not reset.done()
        done = reset.result()
    assert (done.status_code, done.content) == (200, b""), done.text
    assert demo.get("/health").status_code == 200
    after = metrics(demo)
    assert after["state_checkpoint_slots"] == 0, "those of the engine that is gone are counted"
    assert after["prefix_cache_hits_total"] == before["prefix_cache_hits_total"], "a counter fell"
    cold, warm = completion(demo, text, **fields), completion(demo, text, **fields)
    assert cached(cold) == 0 and cached(warm) == cached(known), (cached(cold), cached(warm), cached(known))
    assert first["choices"] == known["choices"] == cold["choices"] == warm["choices"]
