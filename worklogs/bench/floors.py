"""What a checkpoint's configuration says that its tokens cost at least: arithmetic and bytes, without measuring.

Counted is what the mathematics needs, whatever a server does. Arithmetic of a prompt's token: two operations for each
weight that it meets (its own experts, no embedding, no head), the delta rule as a recurrence, attention to all tokens
before. The head is met once, by the last token. Bytes of a step: every weight that one of its tokens meets, once,
recurrent state read and written, the KV of what is attended to.
"""
import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from random_checkpoint import layer_types  # noqa: E402

# Decay, what the key finds (2), what is written there (2) and what the query finds (2), per value of the state.
DELTA_RULE = 7
STATE_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Floors:
    """dense: weights of the layers that every token meets; experts, chosen: number of experts, and of one token;
    expert: weights of one, in all layers; head: weights of the vocabulary's head; state: recurrent values of one
    sequence; tail: values of the convolutions' tails; keys: values of KV per token; attended: operations of one token
    for each token that it attends to; width: bytes of a weight, of KV and of a convolution's tail."""

    dense: int
    experts: int
    chosen: int
    expert: int
    head: int
    state: int
    tail: int
    keys: int
    attended: int
    width: float = 2

    def prompt_flops(self, tokens: int) -> float:
        """Operations per token of a cold prompt."""
        weights = self.dense + self.chosen * self.expert + self.head / tokens
        return 2 * weights + DELTA_RULE * self.state + self.attended * (tokens + 1) / 2

    def growth(self, short: int, long: int) -> float:
        """How many times the operations per token grow from one length to another."""
        return self.prompt_flops(long) / self.prompt_flops(short)

    def step_bytes(self, tokens: int, context: int, sequences: int | None = None) -> float:
        """Bytes of a step over `tokens` tokens, of one sequence each or of `sequences`, each with `context` tokens.

        Of the experts those count that so many tokens are expected to meet, if all are chosen alike."""
        sequences = tokens if sequences is None else sequences
        met = self.experts * (1 - (1 - self.chosen / self.experts)**tokens) if self.experts else 0.0
        weights = self.dense + met * self.expert + self.head
        return self.width * (weights + sequences * (2 * self.tail + context * self.keys)) + (
            2 * STATE_BYTES * sequences * self.state)

    def kept_bytes(self, tokens: int, sequences: int) -> float:
        """KV of `tokens` tokens and the states of `sequences`."""
        return self.width * (tokens * self.keys + sequences * self.tail) + STATE_BYTES * sequences * self.state


def floors(config: dict[str, Any], width: float = 2) -> Floors:
    """Of a parsed config.json.

    Raises:
        KeyError: it lacks a size.
    """
    text = config.get("text_config", config)
    hidden, head = text["hidden_size"], text["head_dim"]
    heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    value_heads, key_size = text["linear_num_value_heads"], text["linear_key_head_dim"]
    keys, values = text["linear_num_key_heads"] * key_size, value_heads * text["linear_value_head_dim"]
    kernel = text["linear_conv_kernel_dim"]
    kinds = layer_types(text)
    full, linear = kinds.count("full_attention"), kinds.count("linear_attention")
    experts = text.get("num_experts") or 0
    # Query and its gate, keys, values, output.
    dense = full * hidden * head * (3 * heads + 2 * kv_heads)
    dense += linear * (hidden * (2 * keys + 3 * values + 2 * value_heads) + (2 * keys + values) * kernel)
    if experts:
        dense += len(kinds) * hidden * (3 * text["shared_expert_intermediate_size"] + experts + 1)
    else:
        dense += len(kinds) * hidden * 3 * text["intermediate_size"]
    return Floors(dense, experts, text.get("num_experts_per_tok", 0) if experts else 0,
                  len(kinds) * 3 * hidden * text["moe_intermediate_size"] if experts else 0,
                  hidden * text["vocab_size"], linear * values * key_size,
                  linear * (2 * keys + values) * (kernel - 1), full * 2 * kv_heads * head, full * 4 * heads * head,
                  width)
