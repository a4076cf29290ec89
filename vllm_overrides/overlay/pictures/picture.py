"""One picture of a prompt, and what a model says about the pictures that it takes."""
import hashlib
from typing import Any, NamedTuple

import torch


class Picture(NamedTuple):
    """One picture, ready for the vision tower, and where it stands in its prompt.

    It travels in `TokensPrompt["multi_modal_data"] = {"image": [Picture, ...]}`, sorted by offset.

    offset: index in the prompt's token ids of its first placeholder. grid: (h, w) in patches, multiples of the merge
    size. pixels: uint8 [h * w, channels, patch, patch], on the CPU: the resized RGB picture, one frame, cut into
    patches in the image processor's row order (merge blocks first), before rescaling and normalisation. digest:
    `digest_of(grid, pixels)`, which the engine does not work out again.
    """
    offset: int
    grid: tuple[int, int]
    pixels: torch.Tensor
    digest: bytes

    def num_tokens(self, merge: int) -> int:
        """Number of placeholders, and of embeddings, where `merge` x `merge` patches make one."""
        return self.grid[0] * self.grid[1] // merge**2


def digest_of(grid: tuple[int, int], pixels: torch.Tensor) -> bytes:
    """Returns the 32 bytes that tell pictures apart: SHA-256 over the grid and the pixels."""
    digest = hashlib.sha256(f"{grid[0]}x{grid[1]}:{tuple(pixels.shape)}:".encode())
    digest.update(pixels.contiguous().numpy().data)
    return digest.digest()


class PictureSettings(NamedTuple):
    """What a model asks of its pictures.

    placeholder: token id that stands for one embedding. merge: side, in patches, of the square that one embedding
    covers. patch: side of a patch in pixels. channels: colours of a pixel.
    """
    placeholder: int
    merge: int
    patch: int
    channels: int

    @classmethod
    def of(cls, hf_config: Any) -> "PictureSettings | None":
        """Returns the settings of a model with a vision tower of ours: a configuration of a ...ForConditionalGeneration
        architecture that has `vision_config` and `image_token_id`. None for every other model.

        Raises:
            ValueError: there is a vision tower, and one of these numbers is missing.
        """
        vision = getattr(hf_config, "vision_config", None)
        names = getattr(hf_config, "architectures", None) or ()
        if vision is None or not any(name in ARCHITECTURES for name in names):
            return None
        values: dict[str, Any] = {"image_token_id": getattr(hf_config, "image_token_id", None)}
        for name in ("spatial_merge_size", "patch_size", "in_channels"):
            values[f"vision_config.{name}"] = getattr(vision, name, None)
        missing = [name for name, value in values.items() if value is None]
        if missing:
            raise ValueError(f"the configuration of a model with a vision tower lacks {', '.join(missing)}")
        return cls(*values.values())


# The architectures whose vision tower is served here; stock's multimodal models keep to stock's own ways.
ARCHITECTURES = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
