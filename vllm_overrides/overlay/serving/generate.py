"""The engine's outputs for the prompts of one request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.render import Prompt
from vllm.sampling_params import SamplingParams

# In place of a prompt's position.
_BUDGET_OVER = -1


async def outputs(engine: Any, prompts: Sequence[Prompt], params: Sequence[SamplingParams], request_id: str, *,
                  priority: int = 0, trace_headers: Mapping[str, str] | None = None,
                  ends: tuple[float, Exception] | None = None, budget_s: float | None = None
                  ) -> AsyncIterator[tuple[int, RequestOutput | None]]:
    """(prompt's position, output), as they come, of all prompts at once.

    engine: an EngineClient. ends: at a time of the event loop, an exception is raised here. budget_s: seconds after
    which an output None comes, and is the last. Closing this generator aborts in the engine what is not finished. An
    exception of the engine is raised here; a ValueError before the first output is its way to refuse a request, so a
    RequestError.
    """
    streams = [engine.generate(_engine_prompt(prompt), one, f"{request_id}-{i}", priority=priority,
                               trace_headers=trace_headers)
               for i, (prompt, one) in enumerate(zip(prompts, params, strict=False))]
    queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()

    async def pump(position: int, stream: AsyncIterator[RequestOutput]) -> None:
        begun = False
        try:
            async for output in stream:
                begun = True
                queue.put_nowait((position, output))
            queue.put_nowait((position, None))
        except Exception as error:
            refused = isinstance(error, ValueError) and not begun
            queue.put_nowait((position, RequestError(str(error)) if refused else error))

    loop = asyncio.get_running_loop()
    timers = []
    if ends is not None:
        timers.append(loop.call_at(ends[0], queue.put_nowait, (0, ends[1])))
    if budget_s is not None:
        timers.append(loop.call_later(budget_s, queue.put_nowait, (_BUDGET_OVER, None)))
    tasks = [asyncio.ensure_future(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            position, output = await queue.get()
            if isinstance(output, Exception):
                raise output
            if position == _BUDGET_OVER:
                yield 0, None
                return
            if output is None:
                running -= 1
            else:
                yield position, output
    finally:
        for timer in timers:
            timer.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _engine_prompt(prompt: Prompt) -> TokensPrompt:
    made = TokensPrompt(prompt_token_ids=list(prompt.token_ids))
    # Stock hands multi_modal_data through to our LLMEngine, and nothing else that it does not know.
    beside: dict[str, Any] = {}
    if prompt.pictures:
        beside["image"] = list(prompt.pictures)
    if prompt.boundaries:
        beside["boundaries"] = prompt.boundaries
    if beside:
        made["multi_modal_data"] = beside
    return made
