"""The plan of a running engine: asked by every rank's worker before weights are loaded, the same answer for all."""
from typing import Any

from vllm.logger import init_logger
from vllm.overlay.model import int8
from vllm.overlay.model.mtp_switch import mtp_is_asked
from vllm.overlay.pictures.picture import PictureSettings
from vllm.overlay.plan.memory import GIB, MemoryPlan, PlanError, Wish, plan, settle, shown
from vllm.overlay.serving.pictures.settings import picture_input
from vllm.transformers_utils.configs.qwen3_5 import CONFIG_CLASSES

logger = init_logger(__name__)


def wish_of(worker: Any, memory: int, utilization: float, free: int | None, host_memory: int,
            kv_tokens: int | None) -> Wish | None:
    """Returns what a worker's configuration asks for; None for a model whose memory is not counted here.

    memory, free, host_memory: bytes, and kv_tokens; see Wish; of the rank that has least.
    """
    model, cache, scheduler = worker.model_config, worker.cache_config, worker.scheduler_config
    if not isinstance(model.hf_config, CONFIG_CLASSES) or model.quantization not in (None, int8.NAME):
        return None
    return Wish(config=model.hf_config, dtype=model.dtype, memory=memory, utilization=utilization, free=free,
                max_model_len=model.max_model_len, max_num_seqs=scheduler.max_num_seqs,
                max_num_batched_tokens=scheduler.max_num_batched_tokens,
                ranks=worker.parallel_config.tensor_parallel_size, block_size=cache.block_size,
                device_type=worker.device.type if worker.device.type == "cpu" else "cuda",
                quantization=model.quantization, mtp=mtp_is_asked(),
                patches=largest_picture(model), prefix_caching=cache.enable_prefix_caching,
                checkpoint_memory=getattr(cache, "checkpoint_memory", None),
                checkpoint_host_memory=getattr(cache, "checkpoint_host_memory", None),
                host_memory=host_memory, kv_tokens=kv_tokens)


def largest_picture(model_config: Any) -> int:
    """Patches of the largest picture that the server's limits let through; 0 for a model that takes none.

    `model_config.picture_pixels` is what the server allows (--max-picture-pixels); without it, what the model's
    preprocessor says.
    """
    settings = PictureSettings.of(model_config.hf_config)
    if settings is None or getattr(model_config, "max_pictures", None) == 0:
        return 0
    pixels = getattr(model_config, "picture_pixels", None)
    if pixels is None:
        found = picture_input(model_config)
        assert found is not None
        pixels = found.max_pixels
    # No prompt holds a picture of more embeddings than its context.
    return min(pixels // settings.patch**2, model_config.max_model_len * settings.merge**2)


def settle_for(worker: Any, wish: Wish) -> MemoryPlan:
    """Makes the worker's configuration one that fits, and says so in the log of the first rank.

    Where the size of the KV cache was asked for, it is not for this plan to refuse.

    Raises:
        PlanError: nothing fits.
    """
    host = wish.checkpoint_host_memory
    if host is not None and wish.host_memory is not None and host * wish.ranks > wish.host_memory:
        raise PlanError(f"--checkpoint-host-memory {shown(host)} on each of {wish.ranks} ranks is more than the "
                        f"{shown(wish.host_memory)} of main memory that are free: lower it")
    found = plan(wish) if wish.kv_tokens is not None else settle(wish)
    first = worker.rank == 0
    if first and found.wish.checkpoint_memory != wish.checkpoint_memory:
        logger.warning("--checkpoint-memory is lowered from %s to %s: more would leave less KV cache than "
                       "max_model_len %d needs.", shown(wish.checkpoint_memory or 0),
                       shown(found.wish.checkpoint_memory or 0), wish.max_model_len)
    if found.wish.max_num_seqs < wish.max_num_seqs:
        if first:
            logger.warning("max_num_seqs is lowered from %d to %d: a sequence's recurrent state takes %.1f MiB per "
                           "rank, and more of them would leave less KV cache than max_model_len %d needs.",
                           wish.max_num_seqs, found.wish.max_num_seqs, found.slot / (1 << 20), wish.max_model_len)
        # Scheduler and memory of the states are made after this, from these numbers.
        worker.scheduler_config.max_num_seqs = found.wish.max_num_seqs
        worker.cache_config.num_state_slots = found.wish.max_num_seqs
    if first:
        logger.info(found.table())
    return found


def compare(found: MemoryPlan, kv_bytes: int, workspace: int, budget: int) -> None:
    """Says how far the plan was from what was measured; a tenth of the budget is worth a warning.

    kv_bytes, workspace: bytes as measured. budget: bytes of memory that were shared out.
    """
    off = kv_bytes - found.kv
    line = "Memory as measured: %.2f GiB for KV (planned %.2f), a step %.2f GiB (planned %.2f)."
    say = logger.warning if abs(off) > budget // 10 else logger.info
    say(line, kv_bytes / GIB, found.kv / GIB, workspace / GIB, found.workspace / GIB)
