"""Start-up decisions about recurrent state: whether a model has any, how many slots, and the pool behind them."""
from typing import Any

import torch
from torch import nn

from vllm.logger import init_logger
from vllm.overlay.hybrid.state_pool import StatePool

logger = init_logger(__name__)

_MIB, _GIB = 1 << 20, 1 << 30


def is_hybrid(hf_config: Any) -> bool:
    """Returns whether some layers keep recurrent state: the configuration's `layers_block_type` names a kind
    "linear_attention"."""
    return "linear_attention" in (getattr(hf_config, "layers_block_type", None) or ())


def plan_slots(model_config: Any, cache_config: Any, scheduler_config: Any, parallel_config: Any) -> None:
    """Sets `cache_config.num_state_slots`, which scheduler and workers both go by: one slot per sequence that can run,
    or 0.

    Prefix caching is switched off for hybrid models: a hit on KV blocks without the state at the same place would be
    wrong.

    Raises:
        ValueError: the model has recurrent state and the engine is to run in a way that cannot carry it.
    """
    cache_config.num_state_slots = 0
    if not is_hybrid(model_config.hf_config):
        return
    for problem, wrong in (("pipeline parallelism", parallel_config.pipeline_parallel_size > 1),
                           ("capture in CUDA graphs (give --enforce-eager)", not model_config.enforce_eager),
                           ("multi-step scheduling", scheduler_config.is_multi_step),
                           ("lookahead slots (speculative decoding)", scheduler_config.num_lookahead_slots > 0),
                           ("delta messages to the workers", scheduler_config.send_delta_data)):
        if wrong:
            raise ValueError(f"{problem} is not supported for models with recurrent state")
    cache_config.num_state_slots = scheduler_config.max_num_seqs
    if cache_config.enable_prefix_caching:
        logger.warning(
            "Prefix caching is off: this model has recurrent state, which the prefix cache does not hold yet.")
        cache_config.enable_prefix_caching = False


def allocate_pool(model: nn.Module,
                  cache_config: Any,
                  device: torch.device,
                  free: int | None = None) -> StatePool | None:
    """Returns the pool of a model that asks for one by `get_state_spec()`, else None. Says in one line how much memory
    it takes. free: bytes that it may take; None = the device will say.

    Raises:
        ValueError: the pool takes more than `free`.
        RuntimeError: scheduler and model disagree about whether there is recurrent state.
    """
    get_spec = getattr(model, "get_state_spec", None)
    slots = getattr(cache_config, "num_state_slots", 0)
    if (get_spec is None) != (slots == 0):
        raise RuntimeError(f"{type(model).__name__} {'has no' if get_spec is None else 'has'} recurrent state, "
                           f"but the scheduler planned {slots} slots for it")
    if get_spec is None:
        return None
    needed = slots * get_spec().slot_bytes
    if free is not None and needed > free:
        raise ValueError(f"too little memory: {slots} slots of recurrent state take {needed / _GIB:.2f} GiB, "
                         f"{free / _GIB:.2f} GiB are free for them: lower --max-num-seqs")
    pool = StatePool(get_spec(), slots, device)
    logger.info("Recurrent state: %d slots of %.2f MiB, %.1f MiB in all.", slots, pool.spec.slot_bytes / _MIB,
                pool.nbytes / _MIB)
    return pool
