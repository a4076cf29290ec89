"""Start-up decisions about recurrent state: whether a model has any, how many slots, and the pool behind them."""
from typing import Any

import torch
from torch import nn

from vllm.logger import init_logger
from vllm.overlay.hybrid.state_pool import StatePool

logger = init_logger(__name__)

_MIB, _GIB = 1 << 20, 1 << 30
# Checkpoints on the device where nobody said how many, and the model's memory is not counted.
_UNCOUNTED = 64


def is_hybrid(hf_config: Any) -> bool:
    """Returns whether some layers keep recurrent state: the configuration's `layers_block_type` names a kind
    "linear_attention"."""
    return "linear_attention" in (getattr(hf_config, "layers_block_type", None) or ())


def plan_slots(model_config: Any, cache_config: Any, scheduler_config: Any, parallel_config: Any) -> None:
    """Sets `cache_config.num_state_slots`, which scheduler and workers both go by: one slot per sequence that can run,
    or 0.

    Prefix caching stays as asked; whether there is room for checkpoints is seen when the pool is made
    (`allocate_pool`).

    Raises:
        ValueError: the model has recurrent state and the engine is to run in a way that cannot carry it.
    """
    cache_config.num_state_slots = 0
    if not is_hybrid(model_config.hf_config):
        _warn_of_idle_sizes(cache_config, "this model has no recurrent state")
        return
    for problem, wrong in (("pipeline parallelism", parallel_config.pipeline_parallel_size > 1),
                           ("capture in CUDA graphs (give --enforce-eager)", not model_config.enforce_eager),
                           ("multi-step scheduling", scheduler_config.is_multi_step),
                           ("lookahead slots (speculative decoding)", scheduler_config.num_lookahead_slots > 0),
                           ("delta messages to the workers", scheduler_config.send_delta_data),
                           ("prefix caching without chunked prefill (leave --enable-chunked-prefill alone)",
                            cache_config.enable_prefix_caching and not scheduler_config.chunked_prefill_enabled)):
        if wrong:
            raise ValueError(f"{problem} is not supported for models with recurrent state")
    if not cache_config.enable_prefix_caching:
        _warn_of_idle_sizes(cache_config, "prefix caching is off (--enable-prefix-caching)")
    cache_config.num_state_slots = scheduler_config.max_num_seqs


def _warn_of_idle_sizes(cache_config: Any, why: str) -> None:
    for name in ("checkpoint_memory", "checkpoint_host_memory"):
        if getattr(cache_config, name, None):
            logger.warning("--%s is without effect: %s.", name.replace("_", "-"), why)


def allocate_pool(model: nn.Module, cache_config: Any, device: torch.device, checkpoints: tuple[int, int] | None = None,
                  free: int | None = None) -> StatePool | None:
    """Returns the pool of a model that asks for one by `get_state_spec()`, else None. Says in one line how much memory
    it takes.

    Sets `cache_config.num_checkpoint_slots` and `num_host_checkpoint_slots`, which scheduler and workers both go by;
    without prefix caching both are 0. Where there is room for no checkpoint, prefix caching is switched off with a line
    that says so: a hit on KV blocks without the state at the same place would be wrong. `state_slot_bytes` is for
    metrics.

    checkpoints: how many on the device and on the host; None: the sizes that were asked for. free: bytes that the
    device's part may take; None = the device will say.

    Raises:
        ValueError: the pool takes more than `free`.
        RuntimeError: scheduler and model disagree about whether there is recurrent state.
    """
    get_spec = getattr(model, "get_state_spec", None)
    slots = getattr(cache_config, "num_state_slots", 0)
    if (get_spec is None) != (slots == 0):
        raise RuntimeError(f"{type(model).__name__} {'has no' if get_spec is None else 'has'} recurrent state, "
                           f"but the scheduler planned {slots} slots for it")
    cache_config.num_checkpoint_slots = cache_config.num_host_checkpoint_slots = 0
    if get_spec is None:
        return None
    spec = get_spec()
    cache_config.state_slot_bytes = spec.slot_bytes
    on_device, on_host = 0, 0
    if cache_config.enable_prefix_caching:
        on_device, on_host = checkpoints or _asked_for(cache_config, spec.slot_bytes)
        if not on_device:
            cache_config.enable_prefix_caching = False
            on_host = 0
            logger.warning("Prefix caching is off: %s, and one checkpoint of this model's recurrent state takes "
                           "%.3g MiB.", _why_none(cache_config), spec.slot_bytes / _MIB)
    needed = (slots + on_device) * spec.slot_bytes
    if free is not None and needed > free:
        raise ValueError(f"too little memory: {slots} slots of recurrent state and {on_device} checkpoints take "
                         f"{needed / _GIB:.2f} GiB, {free / _GIB:.2f} GiB are free for them: lower --max-num-seqs"
                         f"{' or --checkpoint-memory' if on_device else ''}")
    cache_config.num_checkpoint_slots, cache_config.num_host_checkpoint_slots = on_device, on_host
    pool = StatePool(spec, slots, device, on_device, on_host)
    logger.info("Recurrent state: %d slots of %.2f MiB, %.1f MiB in all.", slots, spec.slot_bytes / _MIB,
                slots * spec.slot_bytes / _MIB)
    if on_device:
        logger.info("Checkpoints of recurrent state: %d on the device, %.1f MiB; %d on the host, %.1f MiB%s.",
                    on_device, on_device * spec.slot_bytes / _MIB, on_host, on_host * spec.slot_bytes / _MIB,
                    ", pinned" if on_host and pool.host.pinned else "")
    return pool


def _asked_for(cache_config: Any, slot_bytes: int) -> tuple[int, int]:
    """Of a model whose memory is not planned."""
    device = getattr(cache_config, "checkpoint_memory", None)
    host = getattr(cache_config, "checkpoint_host_memory", None)
    return _UNCOUNTED if device is None else device // slot_bytes, 0 if host is None else host // slot_bytes


def _why_none(cache_config: Any) -> str:
    asked = getattr(cache_config, "checkpoint_memory", None)
    if asked is None:
        return "no memory is left for checkpoints"
    return f"--checkpoint-memory is {asked / _MIB:.3g} MiB"
