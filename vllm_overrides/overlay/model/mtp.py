"""The multi-token-prediction head: from a token's hidden state and the token after it, the one after that.

    x = fc([norm_e(embedding of the next token), norm_h(hidden state)])      y = norm(layer(x))

Embedding and vocabulary head are the model's own. A token keeps its position: row i has hidden state and position of
token i and the embedding of token i + 1. Sources: the published weights, and the order of the two halves and of the
norms from vLLM's and SGLang's qwen3_5_mtp.py.
"""
from collections.abc import Iterable

import torch
from torch import nn
from transformers import PretrainedConfig

from vllm.attention import AttentionMetadata
from vllm.config import CacheConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.models.qwen3_5 import Qwen3_5DecoderLayer, RMSNorm
from vllm.overlay.kernels.rope import Rotation
from vllm.overlay.model.checkpoint import Wanted, copied, linear


class MultiTokenPredictor(nn.Module):
    """`mtp_num_hidden_layers` decoder layers with full attention, one for each further token; more tokens go round.

    Raises:
        ValueError: settings that are not implemented.
    """

    def __init__(self, config: PretrainedConfig, cache_config: CacheConfig | None,
                 quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        if getattr(config, "mtp_use_dedicated_embeddings", False):
            raise ValueError("mtp_use_dedicated_embeddings is not supported")
        self.hidden_size = config.hidden_size
        # Every rank has all of it: reading it takes less time than gathering its results.
        self.fc = ReplicatedLinear(2 * config.hidden_size, config.hidden_size, bias=False, prefix=f"{prefix}.fc")
        self.layers = nn.ModuleList(
            Qwen3_5DecoderLayer(config, None, cache_config, quant_config, f"{prefix}.layers.{layer}")
            for layer in range(config.mtp_num_hidden_layers))
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3))

    def forward(self, hidden_states: torch.Tensor, next_embeddings: torch.Tensor, rotation: Rotation,
                kv_cache: torch.Tensor | None, attn_metadata: AttentionMetadata, step: int = 0) -> torch.Tensor:
        """hidden_states, next_embeddings: [T, hidden] -> [T, hidden], ready for the vocabulary head.

        Args:
            rotation: of the hidden states' positions. kv_cache: of layer `step`, modulo the number of layers.
        """
        x = torch.cat((self.pre_fc_norm_embedding(next_embeddings), self.pre_fc_norm_hidden(hidden_states)), dim=-1)
        x, _ = self.fc(x)
        layer = self.layers[step % len(self.layers)]
        x, residual = layer(x, torch.zeros_like(x), rotation, kv_cache, attn_metadata, None)
        return self.norm(x, residual)[0]

    def wanted(self, name: str) -> Iterable[Wanted]:
        """The checkpoint tensors of the head, whose name there is `name`."""
        yield from linear(f"{name}.fc", self.fc, self.hidden_size, 2 * self.hidden_size)
        for key in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            yield copied(f"{name}.{key}.weight", getattr(self, key).weight)
        for index, layer in enumerate(self.layers):
            yield from layer.wanted(f"{name}.layers.{index}")
