"""Outputs: nothing is sent while a prompt is being computed, samples are joined to their request, prefix hits are
reported."""
from typing import Any, Optional

from vllm import outputs_stock as _stock
from vllm.overlay.rebind import rebind
from vllm.sampling_params import RequestOutputKind
from vllm.sequence import SequenceGroup


class RequestOutput(_stock.RequestOutput):
    """Stock's output. num_cached_tokens: prompt tokens that were taken from the prefix cache, 0 for none; None before
    admission."""
    num_cached_tokens: int | None = None

    @classmethod
    def from_seq_group(cls, seq_group: SequenceGroup, use_cache: bool) -> Optional["RequestOutput"]:
        """Returns what is new about a group, for whoever made the request; None where nothing is."""
        if _says_nothing(seq_group):
            return None
        output = super().from_seq_group(seq_group, use_cache)
        if output is None:
            return None
        output.num_cached_tokens = seq_group.num_cached_tokens
        return output if seq_group.fanout is None else seq_group.fanout.merge(seq_group.request_id, output)


def _says_nothing(seq_group: SequenceGroup) -> bool:
    """Whether no token came since the last output: stock streams an empty one for every piece of a prompt."""
    params = seq_group.sampling_params
    if params is None or seq_group.is_finished():
        return False
    delta = params.output_kind == RequestOutputKind.DELTA
    return all(seq.get_output_len() == (seq._last_output_token_ids_offset if delta else 0)
               for seq in seq_group.get_seqs())


# Stock's factory and its reused output objects name the class.
rebind(_stock, "RequestOutput", RequestOutput)


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
