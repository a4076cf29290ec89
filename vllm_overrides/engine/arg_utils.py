"""Engine arguments with the defaults of `vllm.overlay.engine.defaults`, refused where a step would hang the card."""
from typing import Any

from vllm.config import EngineConfig, ModelConfig
from vllm.engine import arg_utils_stock as _stock
from vllm.overlay.attention.choice import check_config
from vllm.overlay.engine import defaults
from vllm.overlay.pictures.picture import PictureSettings


class EngineArgs(_stock.EngineArgs):
    """Stock's arguments."""

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
        config = super().create_engine_config()
        check_config(config)
        return config


class AsyncEngineArgs(_stock.AsyncEngineArgs, EngineArgs):
    """Stock's arguments of a server."""


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
