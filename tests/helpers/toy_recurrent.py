"""A small model with recurrent state: Qwen2 behind two layers of a linear recurrence with a convolution tail.

It uses the state pool as a real hybrid model does, and is simple enough to be computed without any cache
(`reference_logits`).
"""
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.helpers import tiny_models

ARCHITECTURE = "ToyRecurrentForCausalLM"
LAYERS = 2
DECAY = 0.9


def make(folder: Path) -> Path:
    """Writes the checkpoint: Qwen2's weights, and a configuration that names the kinds of the layers."""
    return tiny_models.make_qwen2(folder, seed=3, architectures=[ARCHITECTURE],
                                  layers_block_type=["attention"] * 2 + ["linear_attention"] * LAYERS)


def recur(x: torch.Tensor, tail: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x: [T, hidden]; tail: [hidden, 2], the two inputs before, latest last; state: [hidden] -> (output, tail, state)
    after x."""
    outputs = []
    for token in x:
        mixed = token + 0.5 * tail[:, 1] + 0.25 * tail[:, 0]
        tail = torch.stack([tail[:, 1], token], 1)
        state = DECAY * state + mixed
        outputs.append(token + torch.tanh(state))
    return torch.stack(outputs), tail, state


def reference_logits(model: Path, tokens: Sequence[int]) -> torch.Tensor:
    """[T, vocabulary] by transformers, the recurrence computed over the whole sequence at once."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    reference = Qwen2ForCausalLM.from_pretrained(model, config=Qwen2Config.from_pretrained(model))
    with torch.no_grad():
        x = reference.model.embed_tokens(torch.tensor(list(tokens)))
        for _ in range(LAYERS):
            x, _, _ = recur(x, torch.zeros(x.shape[1], 2), torch.zeros(x.shape[1]))
        return reference(inputs_embeds=x[None]).logits[0]


def register() -> None:
    """Makes vLLM know the model in this process."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
    from vllm.overlay.hybrid import StateSpec, get_state_step
    if ARCHITECTURE in ModelRegistry.get_supported_archs():
        return

    class ToyRecurrentForCausalLM(Qwen2ForCausalLM):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.steps: list[Any] = []      # What get_state_step() gave in each forward pass.

        def get_state_spec(self) -> StateSpec:
            hidden = self.config.hidden_size
            return StateSpec(LAYERS, (hidden, 2), torch.float32, (1, 1, hidden))

        def forward(self, input_ids, positions, kv_caches, attn_metadata, intermediate_tensors=None):
            assert len(kv_caches) == 2, f"{len(kv_caches)} KV caches for 2 attention layers"
            step = get_state_step()
            self.steps.append(step)
            x = self.model.embed_tokens(input_ids)
            for layer in range(LAYERS if step is not None else 0):
                x = self._layer(x, layer, step)
            return self.model(input_ids, positions, kv_caches, attn_metadata, intermediate_tensors, inputs_embeds=x)

        @staticmethod
        def _layer(x, layer, step):
            outputs = torch.empty_like(x)
            conv, recurrent = step.pool.conv[layer], step.pool.recurrent[layer]
            for row, slot in enumerate(step.live_slots.tolist()):
                piece = slice(step.query_start_loc[row], step.query_start_loc[row + 1])
                for offset, target in sorted((o, s) for r, o, s in step.captures if r == row):
                    _, tail, state = recur(x[piece][:offset], conv[slot], recurrent[slot, 0, 0])
                    conv[target], recurrent[target, 0, 0] = tail, state
                outputs[piece], conv[slot], recurrent[slot, 0, 0] = recur(x[piece], conv[slot], recurrent[slot, 0, 0])
            return outputs

    ModelRegistry.register_model(ARCHITECTURE, ToyRecurrentForCausalLM)
