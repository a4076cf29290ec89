"""The server that `make serve` starts, as a test asks it."""
from __future__ import annotations

import json

import openai

from tests.helpers.server_process import ServerProcess

QUESTION = [{"role": "user", "content": "What is 2+2?"}]


class Demo(ServerProcess):
    """The running server: `ask` posts a chat request and returns the answer's JSON, which must have come with 200."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.api = openai.OpenAI(base_url=f"{self.base}/v1", api_key="none", max_retries=0, timeout=120)

    def ask(self, **body) -> dict:
        response = self.post(**{"messages": QUESTION, **body})
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, **body) -> list[dict]:
        text = self.post(**{"messages": QUESTION, **body, "stream": True}).text
        lines = [line for line in text.split("\n") if line]
        assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]", text
        return [json.loads(line[6:]) for line in lines[:-1]]
