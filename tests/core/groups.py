"""Sequence groups without an engine."""
from itertools import count
from types import SimpleNamespace

from vllm.sampling_params import SamplingParams
from vllm.sequence import Sequence, SequenceGroup, SequenceStatus

BLOCK = 4
_ids = count(1)


def group(tokens, params=None, request_id=None, **fields):
    """A waiting group of one sequence over `tokens`. fields: of SequenceGroup."""
    seq_id = next(_ids)
    inputs = {
        "prompt_token_ids": list(tokens),
        "prompt": None,
        "multi_modal_data": fields.pop("multi_modal_data", None)
    }
    seq = Sequence(seq_id, inputs, BLOCK)
    return SequenceGroup(request_id or f"request-{seq_id}", [seq],
                         0.0,
                         sampling_params=params or SamplingParams(),
                         **fields)


def set_running(one):
    one.seqs[0].status = SequenceStatus.RUNNING


def computed(one, tokens):
    """The step that computed `tokens` more tokens of the group has ended."""
    one.update_num_computed_tokens(tokens)


def appended(one, token):
    """The step's token has been sampled."""
    one.seqs[0].append_token_id(token, {token: SimpleNamespace(logprob=0.0)})
