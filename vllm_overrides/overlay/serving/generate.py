"""The engine's outputs for the prompts of one request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.overlay.serving.backlog import Backlog
from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.render import Prompt
from vllm.sampling_params import SamplingParams


class _BudgetOver(Exception):
    """A request has had its time, and what it has is its answer."""


async def outputs(engine: Any, prompts: Sequence[Prompt], params: Sequence[SamplingParams], request_id: str, *,
                  priority: int = 0, trace_headers: Mapping[str, str] | None = None,
                  ends: tuple[float, Exception] | None = None, budget_s: float | None = None
                  ) -> AsyncIterator[tuple[int, RequestOutput | None]]:
    """(prompt's position, output), as they come, of all prompts at once; outputs that come while nobody asks for one
    are joined.

    engine: an EngineClient with ``feed`` (`PatientClient`). ends: at a time of the event loop, an exception is raised
    here. budget_s: seconds after which an output None comes, and is the last. Closing this generator aborts in the
    engine what is not finished, and so does whatever else ends it. An exception of the engine is raised here; a
    ValueError before the first output is its way to refuse a request, so a RequestError.
    """
    backlog = Backlog()

    async def pump(position: int, prompt: Prompt, one: SamplingParams) -> None:
        begun = False

        def give(output: RequestOutput) -> None:
            nonlocal begun
            begun = True
            backlog.put(position, output)

        try:
            await engine.feed(_engine_prompt(prompt), one, f"{request_id}-{position}", give, priority=priority,
                              trace_headers=trace_headers)
        except Exception as error:
            refused = isinstance(error, ValueError) and not begun
            end(RequestError(str(error), param=getattr(error, "param", None)) if refused else error)

    def end(error: Exception) -> None:
        # Even if nobody takes it for a while, nothing more is computed.
        backlog.end(error)
        for task in tasks:
            task.cancel()

    loop = asyncio.get_running_loop()
    timers = []
    if ends is not None:
        timers.append(loop.call_at(ends[0], end, ends[1]))
    if budget_s is not None:
        timers.append(loop.call_later(budget_s, end, _BudgetOver()))
    tasks = [asyncio.ensure_future(pump(i, prompt, one))
             for i, (prompt, one) in enumerate(zip(prompts, params, strict=False))]
    whole = asyncio.gather(*tasks, return_exceptions=True)
    whole.add_done_callback(lambda _: backlog.end())
    try:
        while (found := await backlog.get()) is not None:
            yield found
    except _BudgetOver:
        yield 0, None
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
    if prompt.cache_salt is not None:
        beside["cache_salt"] = prompt.cache_salt
    if beside:
        made["multi_modal_data"] = beside
    return made
