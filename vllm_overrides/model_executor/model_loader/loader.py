"""Extension: a model that reads parts of a checkpoint is given its shards instead of a stream of whole tensors."""
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from vllm.config import LoadConfig, LoadFormat, ModelConfig
from vllm.model_executor.model_loader import loader_stock as _stock
from vllm.overlay.model.shards import INDEX, Shards

BaseModelLoader = _stock.BaseModelLoader


class DefaultModelLoader(_stock.DefaultModelLoader):

    def _get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterable[Any]:
        if not getattr(model, "reads_shards", False) or self.load_config.load_format not in (LoadFormat.AUTO,
                                                                                             LoadFormat.SAFETENSORS):
            return super()._get_all_weights(model_config, model)
        folder = Path(model_config.model)
        if not folder.is_dir():
            # Downloads what is missing.
            folder = Path(self._prepare_weights(model_config.model, model_config.revision, True)[0])
        if (folder / INDEX).exists() or any(folder.glob("*.safetensors")):
            return Shards(folder)
        return super()._get_all_weights(model_config, model)


def get_model_loader(load_config: LoadConfig) -> BaseModelLoader:
    loader = _stock.get_model_loader(load_config)
    return DefaultModelLoader(load_config) if type(loader) is _stock.DefaultModelLoader else loader


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
