"""Pictures of random pixels, and prompts that hold them, for tiny models with a vision tower."""
from collections.abc import Sequence
from typing import Any

import torch

from vllm.overlay.pictures.picture import Picture, PictureSettings, digest_of

PLACEHOLDER, MERGE, PATCH, CHANNELS = 120, 2, 4, 3
SETTINGS = PictureSettings(PLACEHOLDER, MERGE, PATCH, CHANNELS)
VISION = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "in_channels": CHANNELS,
          "patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2, "num_position_embeddings": 16}


def picture(height: int, width: int, seed: int = 0, offset: int = 0) -> Picture:
    """A picture of height x width patches; equal arguments, equal pictures."""
    generator = torch.Generator().manual_seed(1000 * height + 10 * width + seed)
    pixels = torch.randint(0, 256, (height * width, CHANNELS, PATCH, PATCH), generator=generator, dtype=torch.uint8)
    return Picture(offset, (height, width), pixels, digest_of((height, width), pixels))


def words(length: int, seed: int = 0) -> list[int]:
    """Token ids that are no placeholder."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, PLACEHOLDER, (length, ), generator=generator).tolist()


def pictured(*parts: int | Picture) -> dict[str, Any]:
    """A TokensPrompt of the parts in a row: a number is that many words (other ones for another place), a picture
    becomes its placeholders."""
    ids: list[int] = []
    pictures = []
    for index, part in enumerate(parts):
        if isinstance(part, Picture):
            pictures.append(part._replace(offset=len(ids)))
            ids += [PLACEHOLDER] * part.num_tokens(MERGE)
        else:
            ids += words(part, seed=100 * index + part)
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}} if pictures else {"prompt_token_ids": ids}


def edges(prompt: dict[str, Any]) -> list[int]:
    """Where to cut the prompt to test its pictures' edges: at, one before and one after each, within the prompt."""
    found = set()
    for one in prompt["multi_modal_data"]["image"]:
        for edge in (one.offset, one.offset + one.num_tokens(MERGE)):
            found |= {edge - 1, edge, edge + 1}
    return sorted(cut for cut in found if 0 < cut < len(prompt["prompt_token_ids"]))


def watch_towers(model: Any, monkeypatch: Any) -> list[list[tuple[int, int]]]:
    """Returns a list that gets the grids of every call of the model's `embed_pictures`."""
    calls: list[list[tuple[int, int]]] = []
    embed = model.embed_pictures

    def watched(pixels: Sequence[torch.Tensor], grids: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        calls.append([tuple(grid) for grid in grids])
        return embed(pixels, grids)

    monkeypatch.setattr(model, "embed_pictures", watched)
    return calls
