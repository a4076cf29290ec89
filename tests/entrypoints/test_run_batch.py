"""Stock's `run_batch` end to end over a tiny hybrid model: a line of the file is answered as the server answers it."""

from __future__ import annotations

import json
import shutil

import httpx
import pytest

from tests.helpers.fake_engine import SMALL, settings
from tests.helpers.tokenizer import ADDED_TOKENS, tokenizer_folder
from tests.models.shapes import moe, text
from vllm.entrypoints.openai import run_batch
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.overlay.serving.app import build_app, init_app_state
from vllm.overlay.serving.service import Service
from vllm.utils import FlexibleArgumentParser
from worklogs.random_checkpoint import write_checkpoint

CONTEXT = 512
BODIES = [{"messages": [{"role": "user", "content": content}], "model": "llm", "temperature": 0, **more}
          for content, more in [("Hello", {"max_tokens": 16}), ("中文 🎉", {"max_completion_tokens": 9, "nosuch": 1}),
                                ("three " * 40, {"max_tokens": 6, "n": 2, "logprobs": True, "enable_thinking": False})]]


@pytest.fixture
def model(tmp_path):
    config = {**text(64, 4, 4, (4, 2, 32), (2, 4, 16, 16), 4, 0.5, **moe(4, 2, 24, 40)),
              "vocab_size": SMALL + ADDED_TOKENS, "max_position_embeddings": CONTEXT, "model_type": "qwen3_5_moe_text",
              "architectures": ["Qwen3_5MoeForCausalLM"], "dtype": "float32", "tie_word_embeddings": False}
    write_checkpoint(tmp_path / "model", config, seed=5)
    for file in tokenizer_folder(small=SMALL).iterdir():
        shutil.copy(file, tmp_path / "model")
    return tmp_path / "model"


def without_chance(answer: dict) -> dict:
    """What two answers to one greedy request must share."""
    counts = {name: value for name, value in answer["usage"].items() if name != "prompt_tokens_details"}
    tokens = [[one["token"] for one in (choice["logprobs"] or {"content": []})["content"]]
              for choice in answer["choices"]]
    return {"choices": [{**choice, "logprobs": None} for choice in answer["choices"]], "tokens": tokens,
            "usage": counts, "model": answer["model"], "object": answer["object"], "keys": sorted(answer)}


async def test_the_batch_and_the_server_say_the_same(model, tmp_path, monkeypatch):
    engines = []
    start = run_batch.AsyncLLMEngine.from_engine_args
    monkeypatch.setattr(run_batch.AsyncLLMEngine, "from_engine_args",
                        lambda *args, **more: engines.append(start(*args, **more)) or engines[0])
    source, result = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions",
                                            "body": body}) for i, body in enumerate(BODIES)))
    monkeypatch.setattr("sys.argv", [
        "run_batch", "-i", str(source), "-o", str(result), "--model", str(model), "--served-model-name", "llm",
        "--dtype", "float32", "--max-model-len", str(CONTEXT), "--num-gpu-blocks-override", "256",
        "--max-num-seqs", "8", "--disable-log-requests"])
    await run_batch.main(run_batch.parse_args())
    engine, = engines
    lines = [json.loads(one) for one in result.read_text().splitlines()]

    app = build_app(make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", str(model)]))
    config = await engine.get_model_config()
    service = Service(engine, await engine.get_tokenizer(), settings(max_model_len=CONTEXT))
    init_app_state(app.state, service, config)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
        answers = [(await http.post("/v1/chat/completions", json=body)).json() for body in BODIES]
    engine.shutdown_background_loop()
    for line, answer in zip(lines, answers, strict=True):
        assert line["error"] is None and line["response"]["status_code"] == 200, line
        assert without_chance(line["response"]["body"]) == without_chance(answer)
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [16, 9, 12]
    assert "reasoning_content" in answers[0]["choices"][0]["message"], answers[0]
