"""The sizes of a hybrid model on one tensor-parallel rank."""
from typing import Any, NamedTuple

import torch

from vllm.transformers_utils.configs.qwen3_5 import LINEAR_ATTENTION


class Sizes(NamedTuple):
    """Numbers of elements, of this rank where the ranks share.

    layers, linear_layers: all, and those with recurrent state. heads, kv_heads, head: of full attention. key_heads,
    value_heads, key, value, width: of Gated DeltaNet. experts: 0 in a dense model, whose `inner` is the MLP's. item:
    bytes of one element.
    """
    ranks: int
    item: int
    hidden: int
    vocab: int
    layers: int
    linear_layers: int
    heads: int
    kv_heads: int
    head: int
    rotary: int
    key_heads: int
    value_heads: int
    key: int
    value: int
    width: int
    experts: int
    top_k: int
    inner: int
    shared: int

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key + self.value_heads * self.value

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sequence's state; what `StateSpec.slot_bytes` says once the model is there."""
        tail = self.channels * (self.width - 1) * self.item
        return self.linear_layers * (tail + self.value_heads * self.key * self.value * 4)

    @classmethod
    def of(cls, text: Any, ranks: int, dtype: torch.dtype) -> "Sizes":
        """text: the language model's configuration.

        Raises:
            ValueError: the ranks cannot share these sizes.
        """
        moe = hasattr(text, "num_experts")
        shared = ["linear_num_key_heads", "linear_num_value_heads", "num_attention_heads"]
        shared += ["moe_intermediate_size", "shared_expert_intermediate_size"] if moe else ["intermediate_size"]
        uneven = [f"{name} {getattr(text, name)}" for name in shared if getattr(text, name) % ranks]
        if text.num_key_value_heads % ranks and ranks % text.num_key_value_heads:
            uneven.append(f"num_key_value_heads {text.num_key_value_heads}")
        if uneven:
            raise ValueError(f"tensor parallel size {ranks} does not divide {', '.join(uneven)}")
        return cls(ranks=ranks, item=dtype.itemsize, hidden=text.hidden_size, vocab=text.vocab_size,
                   layers=text.num_hidden_layers, linear_layers=text.layer_types.count(LINEAR_ATTENTION),
                   heads=text.num_attention_heads // ranks, kv_heads=max(1, text.num_key_value_heads // ranks),
                   head=text.head_dim, rotary=int(text.head_dim * text.rope_parameters["partial_rotary_factor"]),
                   key_heads=text.linear_num_key_heads // ranks, value_heads=text.linear_num_value_heads // ranks,
                   key=text.linear_key_head_dim, value=text.linear_value_head_dim, width=text.linear_conv_kernel_dim,
                   experts=text.num_experts if moe else 0, top_k=text.num_experts_per_tok if moe else 0,
                   inner=(text.moe_intermediate_size if moe else text.intermediate_size) // ranks,
                   shared=text.shared_expert_intermediate_size // ranks if moe else 0)
