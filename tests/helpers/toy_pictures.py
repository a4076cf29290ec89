"""A small attention-only model that takes pictures: Qwen2, and a fixed linear map in the place of a vision tower.

It serves what models with recurrent state cannot yet: the prefix cache.
"""
from pathlib import Path
from typing import Any

import torch

from tests.helpers import tiny_models
from tests.helpers.pictures import CHANNELS, MERGE, PATCH, PLACEHOLDER

ARCHITECTURE = "ToyPicturesForConditionalGeneration"


def make(folder: Path) -> Path:
    """Writes the checkpoint: Qwen2's weights, and what a configuration says about pictures."""
    return tiny_models.make_qwen2(folder, seed=5, architectures=[ARCHITECTURE], image_token_id=PLACEHOLDER,
                                  vision_sizes=[MERGE, PATCH, CHANNELS])


def register(monkeypatch: Any) -> None:
    """Makes vLLM know the model, and take its pictures for ours, while `monkeypatch` lasts."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
    from vllm.overlay.pictures import picture
    from vllm.overlay.pictures.picture_step import get_picture_step

    real = picture.PictureSettings.of

    def settings(hf_config: Any) -> picture.PictureSettings | None:
        if ARCHITECTURE in hf_config.architectures:
            return picture.PictureSettings(hf_config.image_token_id, *hf_config.vision_sizes)
        return real(hf_config)

    monkeypatch.setattr(picture.PictureSettings, "of", settings)
    if ARCHITECTURE in ModelRegistry.get_supported_archs():
        return

    class ToyPicturesForConditionalGeneration(Qwen2ForCausalLM):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            generator = torch.Generator().manual_seed(0)
            values = MERGE**2 * CHANNELS * PATCH**2
            self.map = torch.randn((values, self.config.hidden_size), generator=generator) * (4 / values)**0.5
            self.positions: list[torch.Tensor] = []

        def embed_pictures(self, pixels, grids):
            return [(one.float() / 127.5 - 1).view(-1, self.map.shape[0]) @ self.map for one in pixels]

        def forward(self, input_ids, positions, kv_caches, attn_metadata, intermediate_tensors=None):
            self.positions.append(positions)
            x = self.model.embed_tokens(input_ids)
            if (step := get_picture_step()) is not None:
                step.place(x)
            # Qwen2 has one position per token; any mistake in one of three shows.
            place = positions if positions.dim() == 1 else (positions * torch.tensor([[1], [3], [5]])).sum(0) // 9
            return self.model(input_ids, place, kv_caches, attn_metadata, intermediate_tensors, inputs_embeds=x)

    ModelRegistry.register_model(ARCHITECTURE, ToyPicturesForConditionalGeneration)
