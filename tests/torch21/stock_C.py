"""Laid as `vllm/_C.py` into a copy of stock's source: the compiled operators that a Qwen model calls, in PyTorch.

Signatures as in stock's csrc/cpu/torch_bindings.cpp. Stock imports this before anything else, so it also gives torch
2.1 two names that stock takes from a newer one and that matter to a compiler only.
"""
from __future__ import annotations

import torch
import torch._dynamo

from tests.torch21.standins.ixformer import functions

_library = torch.library.Library("_C", "DEF")


def _define(signature: str, implementation: object) -> None:
    _library.define(signature)
    _library.impl(signature.partition("(")[0], implementation, "CPU")


_define("silu_and_mul(Tensor! out, Tensor input) -> ()", lambda out, input: functions.silu_and_mul(input, out))
_define("rms_norm(Tensor! out, Tensor input, Tensor weight, float epsilon) -> ()",
        lambda out, input, weight, epsilon: functions.rms_norm(input, weight, out, epsilon))
_define("fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor weight, float epsilon) -> ()",
        functions.fused_add_rms_norm)
_define("rotary_embedding(Tensor positions, Tensor! query, Tensor! key, int head_size, Tensor cos_sin_cache, "
        "bool is_neox) -> ()", functions.vllm_rotary_embedding_neox)

torch.library.register_fake = lambda name: lambda function: function
# Stock's model runner sets it.
torch._dynamo.config._allowed_keys.add("accumulated_cache_size_limit")
