"""`--quantization int8_weight_only`: large matrices in int8, made from the checkpoint's own while they are loaded.

What stays as it is: embedding, head, norms, router, vision tower, and the projections of Gated DeltaNet, whose errors
add up in the state. VLLM_OVERLAY_INT8_LINEAR_ATTN=1 includes the large ones of these, VLLM_OVERLAY_INT8_HEAD=1 the
head, where it is no embedding at the same time.
"""
import os
from typing import Any

import torch
from torch import nn

from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.utils import set_weight_attrs
from vllm.overlay.kernels.int8_weights import int8_linear, pack
from vllm.overlay.model.checkpoint import SCALE
from vllm.overlay.model.packing import exchange

NAME = "int8_weight_only"
LINEAR_ATTENTION_TOO = "VLLM_OVERLAY_INT8_LINEAR_ATTN"
HEAD, HEAD_TOO = "lm_head", "VLLM_OVERLAY_INT8_HEAD"


class Int8WeightOnlyConfig(QuantizationConfig):
    """Stock's view of it: a quantisation that needs no file of its own."""

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Int8WeightOnlyConfig":
        """Only reached by a checkpoint whose own configuration names this quantisation; none can.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{NAME} is made from unquantised checkpoints while they are loaded; this one says that it is "
                         f"quantised: {config}")

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethodBase | None:
        if isinstance(layer, ParallelLMHead):
            return Int8LinearMethod() if covers(prefix) else None
        if not isinstance(layer, LinearBase):
            return None
        return Int8LinearMethod() if covers(prefix) else UnquantizedLinearMethod()

    def get_scaled_act_names(self) -> list[str]:
        return []


def covers(name: str) -> bool:
    """Whether the large matrix of this name is put into int8."""
    asked = LINEAR_ATTENTION_TOO if ".linear_attn." in name else HEAD_TOO if name.startswith(HEAD) else None
    return asked is None or os.environ.get(asked, "0") == "1"


class Int8LinearMethod(LinearMethodBase):
    """Parameters `weight`, int8, and its scale. vllm.overlay.model.checkpoint fills both."""

    def create_weights(self, layer: nn.Module, input_size_per_partition: int, output_partition_sizes: list[int],
                       input_size: int, output_size: int, params_dtype: torch.dtype, **extra_weight_attrs: Any) -> None:
        shape = (sum(output_partition_sizes), input_size_per_partition)
        for name, param in zip(("weight", SCALE), int8_parameters(*shape), strict=True):
            set_weight_attrs(param, {"output_dim": 0, **extra_weight_attrs})
            layer.register_parameter(name, param)
        self.operand = params_dtype

    def pack_weights(self, layer: nn.Module) -> None:
        """See packing.py."""
        weight = layer.weight.data
        exchange(layer, "weight", pack(weight, weight.shape[0], self.operand))

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return int8_linear(x, layer.weight, getattr(layer, SCALE), bias)


def int8_parameters(*shape: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Empty parameters for a matrix, or a stack of matrices, of this shape: int8, and float32 without the last
    dimension."""
    return (nn.Parameter(torch.empty(*shape, dtype=torch.int8), requires_grad=False),
            nn.Parameter(torch.empty(*shape[:-1], dtype=torch.float32), requires_grad=False))
