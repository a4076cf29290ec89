"""Forgetting the prefix cache of an engine in another process: the message, and the answer when it is done."""
from dataclasses import dataclass

from vllm.engine.multiprocessing import RPCAbortRequest


@dataclass
class ResetPrefixCache(RPCAbortRequest):
    """request_id: of the message, for the answer.

    Stock's engine ends over a message of a kind that it does not know. To stock this is the abort of a request, which
    our MQLLMEngine tells from others where it handles them.
    """


@dataclass(frozen=True)
class PrefixCacheIsReset:
    """request_id: of the message. It travels among outputs of requests, which have the same attribute."""
    request_id: str
