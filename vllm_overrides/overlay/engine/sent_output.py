"""What the engine's process tells the server of an output: what is new, in a form that takes little to write and read.

The prompt, which the server has sent, the times and the adapter of a request stay behind: pickled with every token they
were most of the message.
"""
import copyreg
import io
import pickle
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput


def _made(request_id: str, prompt_logprobs: Any, outputs: list[tuple], finished: bool, cached: int | None
          ) -> RequestOutput:
    made = RequestOutput(request_id, None, None, prompt_logprobs, [CompletionOutput(*one) for one in outputs], finished)
    made.num_cached_tokens = cached
    return made


def _parts(output: RequestOutput) -> tuple:
    outputs = [(one.index, one.text, list(one.token_ids), one.cumulative_logprob, one.logprobs, one.finish_reason,
                one.stop_reason) for one in output.outputs]
    return _made, (output.request_id, output.prompt_logprobs, outputs, output.finished, output.num_cached_tokens)


_TABLE = {**copyreg.dispatch_table, RequestOutput: _parts}


def written(message: Any) -> bytes:
    """A message of the engine, pickled; RequestOutputs in it without prompt, metrics and lora_request."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _TABLE
    pickler.dump(message)
    return buffer.getvalue()
