"""Defaults of engine arguments that stock leaves to the user or gets wrong for long contexts, the same on every
device."""
from typing import Any

from vllm.logger import init_logger
from vllm.overlay.hybrid.plan import is_hybrid

logger = init_logger(__name__)

# Tokens per step where none are asked for. Stock's 512 reads all weights four times as often.
DEFAULT_TOKENS_PER_STEP = 2048


def apply(arguments: Any, model_config: Any) -> None:
    """Completes EngineArgs once the model is known. arguments: the EngineArgs, changed in place.

    Raises:
        ValueError: a number of tokens or sequences per step that cannot work.
    """
    for name in ("max_num_batched_tokens", "max_num_seqs", "block_size"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if arguments.enable_chunked_prefill is None:
        arguments.enable_chunked_prefill = _can_chunk(arguments, model_config)
    if arguments.enable_prefix_caching and not arguments.enable_chunked_prefill and _can_chunk(arguments, model_config):
        logger.warning("Chunked prefill is on: prefix caching needs it.")
        arguments.enable_chunked_prefill = True
    if (arguments.enable_chunked_prefill and arguments.max_num_batched_tokens is None
            and arguments.num_scheduler_steps == 1):
        arguments.max_num_batched_tokens = max(DEFAULT_TOKENS_PER_STEP, arguments.max_num_seqs)
    if is_hybrid(model_config.hf_config) and not model_config.enforce_eager:
        # A captured graph replays fixed addresses: no slot, no row start of a later step would reach the model.
        model_config.enforce_eager = True
        logger.info("CUDA graphs are off: this model has recurrent state, which moves from slot to slot.")
    if arguments.preemption_mode == "swap":
        logger.warning("--preemption-mode swap is ignored: preempted sequences are always recomputed.")
    # Nothing is ever swapped, so no memory is set aside for it.
    arguments.swap_space = 0


def _can_chunk(arguments: Any, model_config: Any) -> bool:
    """Whether prompts can be computed in pieces. Stock asks the same, but only on CUDA and above 32 K tokens of
    context."""
    return (model_config.get_sliding_window() is None and not model_config.embedding_mode
            and not model_config.is_encoder_decoder_model
            and (not model_config.is_multimodal_model or is_hybrid(model_config.hf_config))
            and arguments.speculative_model is None and arguments.num_scheduler_steps == 1
            and not arguments.enable_lora and not arguments.enable_prompt_adapter)
