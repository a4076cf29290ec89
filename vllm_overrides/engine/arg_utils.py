"""Engine arguments with the defaults of `vllm.overlay.engine.defaults`, refused where a step would hang the card."""
from dataclasses import dataclass
from typing import Any

from vllm.config import EngineConfig, ModelConfig
from vllm.engine import arg_utils_stock as _stock
from vllm.overlay.attention.choice import check_config
from vllm.overlay.engine import defaults
from vllm.overlay.pictures.picture import PictureSettings
from vllm.overlay.runtime.byte_size import SizeError, size
from vllm.utils import FlexibleArgumentParser


@dataclass
class EngineArgs(_stock.EngineArgs):
    """Stock's arguments.

    checkpoint_memory, checkpoint_host_memory: bytes per rank, or a text such as "2GiB", for checkpoints of recurrent
    state on the device and on the host; None: as the memory plan says (docs/memory.md).
    """

    checkpoint_memory: int | str | None = None
    checkpoint_host_memory: int | str | None = None

    @staticmethod
    def add_cli_args(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
        return _add_checkpoint_args(_stock.EngineArgs.add_cli_args(parser))

    def create_model_config(self) -> ModelConfig:
        """Called by `create_engine_config` before it reads the other arguments, which depend on the model."""
        # Stock knows nothing of pictures in our models, and refuses a limit for models that it thinks take none.
        limits, self.limit_mm_per_prompt = self.limit_mm_per_prompt, None
        model_config = super().create_model_config()
        self.limit_mm_per_prompt = limits
        if limits and PictureSettings.of(model_config.hf_config) is None:
            model_config.multimodal_config = model_config._init_multimodal_config(limits)
        elif limits:
            model_config.max_pictures = limits.get("image")
        defaults.apply(self, model_config)
        return model_config

    def create_engine_config(self) -> EngineConfig:
        sizes = {name: _bytes(name, getattr(self, name)) for name in ("checkpoint_memory", "checkpoint_host_memory")}
        config = super().create_engine_config()
        check_config(config)
        for name, value in sizes.items():
            setattr(config.cache_config, name, value)
        return config


@dataclass
class AsyncEngineArgs(_stock.AsyncEngineArgs, EngineArgs):
    """Stock's arguments of a server."""

    @staticmethod
    def add_cli_args(parser: FlexibleArgumentParser, async_args_only: bool = False) -> FlexibleArgumentParser:
        parser = _stock.AsyncEngineArgs.add_cli_args(parser, async_args_only)
        return parser if async_args_only else _add_checkpoint_args(parser)


def _add_checkpoint_args(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
    parser.add_argument("--checkpoint-memory", type=size, metavar="SIZE",
                        help="memory of each card for checkpoints of recurrent state, which the prefix cache of a "
                        "hybrid model needs: 2GiB, say; 0: none, and no prefix cache. Default: a tenth of what is left "
                        "for KV, on a CPU a fifth, at most 2 GiB")
    parser.add_argument("--checkpoint-host-memory", type=size, metavar="SIZE",
                        help="main memory for each card's checkpoints that the card has no room for. Default: 8 GiB, "
                        "at most an eighth of what is free; on a CPU none")
    return parser


def _bytes(name: str, value: int | str | None) -> int | None:
    try:
        found = size(value) if isinstance(value, str) else value
    except SizeError as error:
        raise ValueError(f"{name}: {error}") from None
    if found is not None and (not isinstance(found, int) or found < 0):
        raise ValueError(f"{name} must be a whole number of bytes, or a size such as '2GiB', got {value!r:.80}")
    return found


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
