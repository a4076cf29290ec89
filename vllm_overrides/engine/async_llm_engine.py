"""The asynchronous engine in the server's own process: a failed step reaches the requests that were in it, and nobody
makes logits processors of outlines."""
import asyncio
from collections.abc import Callable
from typing import Any

from vllm.engine import async_llm_engine_stock as _stock
from vllm.outputs import EmbeddingRequestOutput, RequestOutput
from vllm.overlay.engine.step_failure import StepFailed
from vllm.overlay.rebind import rebind
from vllm.sampling_params import SamplingParams
from vllm.utils import weak_bind

# As in the synchronous engine.
_PATIENCE_S = 0.005


async def build_guided_decoding_logits_processor_async(sampling_params: SamplingParams, *_: Any,
                                                       **__: Any) -> SamplingParams:
    """Stock makes a logits processor here, which cannot go along with a sequence; ours is the engine's business."""
    return sampling_params


rebind(_stock, "build_guided_decoding_logits_processor_async", build_guided_decoding_logits_processor_async)


class _AsyncLLMEngine(_stock._AsyncLLMEngine):
    """Stock's, over our LLMEngine."""

    def has_unfinished_requests_for_virtual_engine(self, virtual_engine: int) -> bool:
        return bool(self.grammars) or super().has_unfinished_requests_for_virtual_engine(virtual_engine)

    async def step_async(self, virtual_engine: int) -> list[RequestOutput | EmbeddingRequestOutput]:
        if self._add_compiled():
            await asyncio.sleep(_PATIENCE_S)
            return []
        self._before_step(virtual_engine)
        try:
            return await super().step_async(virtual_engine)
        except Exception as error:
            return self._survive(virtual_engine, error)


class AsyncLLMEngine(_stock.AsyncLLMEngine):
    """Stock's client of the engine in its own process."""

    _engine_class: type[_AsyncLLMEngine] = _AsyncLLMEngine

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engine.on_step_failure = weak_bind(self._report_failure)

    async def feed(self, prompt: Any, params: SamplingParams, request_id: str, give: Callable[[RequestOutput], None],
                   **beside: Any) -> None:
        """Stock's `generate`, which calls ``give`` with each output; returns after the last. Whatever ends it, the
        engine stops working on the request."""
        stream = self.generate(prompt, params, request_id, **beside)
        try:
            async for output in stream:
                give(output)
        finally:
            await stream.aclose()

    async def reset_prefix_cache(self) -> None:
        """Returns when every prefix that was computed is forgotten; running requests go on."""
        self.engine.reset_prefix_cache()

    def _report_failure(self, failure: StepFailed) -> None:
        for request_id in failure.request_ids:
            self._request_tracker.process_exception(request_id, failure, verbose=self.log_requests)


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
