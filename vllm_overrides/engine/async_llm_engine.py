"""The asynchronous engine in the server's own process: a failed step reaches the requests that were in it."""
from typing import Any

from vllm.engine import async_llm_engine_stock as _stock
from vllm.outputs import EmbeddingRequestOutput, RequestOutput
from vllm.overlay.engine.step_failure import StepFailed
from vllm.utils import weak_bind


class _AsyncLLMEngine(_stock._AsyncLLMEngine):
    """Stock's, over our LLMEngine."""

    async def step_async(self, virtual_engine: int) -> list[RequestOutput | EmbeddingRequestOutput]:
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

    async def reset_prefix_cache(self) -> None:
        """Returns when every prefix that was computed is forgotten; running requests go on."""
        self.engine.reset_prefix_cache()

    def _report_failure(self, failure: StepFailed) -> None:
        for request_id in failure.request_ids:
            self._request_tracker.process_exception(request_id, failure, verbose=self.log_requests)


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
