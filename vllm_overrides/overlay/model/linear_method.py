"""Has a model's unquantised linear layers and its head computed by the operator `linear`."""

import torch
from torch import nn

from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.overlay.kernels.linear import backends, linear, pack
from vllm.overlay.model.packing import exchange


class LinearOperatorMethod(UnquantizedLinearMethod):
    """Stock's, with our product."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, layer.weight, bias)

    def pack_weights(self, layer: nn.Module) -> None:
        """See packing.py."""
        exchange(layer, "weight", pack(layer.weight.data))


class EmbeddingOperatorMethod(UnquantizedEmbeddingMethod):
    """The same for a head."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, layer.weight, bias)

    def pack_weights(self, layer: nn.Module) -> None:
        """See packing.py. An embedding, tied to the head or not, stays in rows."""
        if isinstance(layer, ParallelLMHead):
            exchange(layer, "weight", pack(layer.weight.data))


def use_linear_operator(model: nn.Module) -> None:
    """Exchanges the methods of all layers below `model` that are stock's own; quantised ones stay.

    Where the operator would ask PyTorch, stock's stay too: a vendor's may know something better.
    """
    if backends.chosen_name() == "torch":
        return
    for layer in model.modules():
        for name in ("quant_method", "linear_method"):
            method = getattr(layer, name, None)
            if type(method) is UnquantizedLinearMethod:
                setattr(layer, name, LinearOperatorMethod())
            elif type(method) is UnquantizedEmbeddingMethod:
                setattr(layer, name, EmbeddingOperatorMethod())
