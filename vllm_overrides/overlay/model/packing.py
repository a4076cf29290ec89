"""Has the back ends pack a model's weights, in the weights' own memory, once they are loaded.

Who owns weights has a method `pack_weights`: a layer of ours, or a stock layer's method (which gets the layer). In
place of a parameter the layer then has `Panels` of its name: what would read rows fails, instead of reading others.
"""
from typing import Any

from torch import nn

from vllm.overlay.kernels.panels import Panels, Weight


def pack_weights(model: nn.Module) -> None:
    """Packs the weights below `model` where their back ends want that. To be called once, after the checkpoint is
    loaded: no other can be loaded afterwards, and the model's state cannot be saved."""
    for layer in model.modules():
        if hasattr(layer, "pack_weights"):
            layer.pack_weights()
        for name in ("quant_method", "linear_method"):
            method = getattr(layer, name, None)
            if method is not None and hasattr(method, "pack_weights"):
                method.pack_weights(layer)
    if any(isinstance(value, Panels) for layer in model.modules() for value in vars(layer).values()):
        model.register_state_dict_pre_hook(_refuse)


def _refuse(*_: Any) -> None:
    raise RuntimeError("this model cannot be saved: weights are packed for the operators of this processor, and lie in "
                       "the checkpoint that they were loaded from")


def exchange(layer: nn.Module, name: str, weight: Weight) -> None:
    """Puts a weight in panels where the layer has parameter `name`. One in rows is that parameter, and stays."""
    if isinstance(weight, Panels):
        delattr(layer, name)
        setattr(layer, name, weight)
