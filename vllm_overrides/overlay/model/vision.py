"""The vision tower of Qwen3.5 / Qwen3.6: patches of pictures to embeddings, one per merged square of patches.

Source: Hugging Face transformers 5 (models/qwen3_5, Qwen3_5VisionModel), which the tests compare with. N is a number of
patches. Everything but attention runs in pieces of rows, so that what grows with a picture is the hidden state and one
layer's queries, keys, values and mixed values. The hidden state is float32: it is a sum over all layers, and float16
has no room for its largest values.
"""
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig

from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.overlay.kernels.rope import Rotation, apply_rope
from vllm.overlay.kernels.vision_attention import vision_attention
from vllm.overlay.kernels.vision_attention.torch_impl import score_bytes
from vllm.overlay.model.checkpoint import Wanted, copied, linear

# Patches that go through the tower together; a larger picture goes alone.
BATCH_PATCHES = 16384
# Rows of one piece: two float32 intermediates of 4304 values are 71 MB then.
PIECE_ROWS = 2048
NORM_EPS = 1e-6
DEFAULT_THETA = 10000.0
ROPE_TYPES = (None, "default", "axial")

Grid = tuple[int, int]


class VisionTower(nn.Module):
    """Patches to embeddings.

    Heads and inner sizes are split over the tensor-parallel ranks where they divide; what does not divide is computed
    by every rank.

    Args:
        config: `vision_config`. hidden_size: of the language model.

    Raises:
        ValueError: settings that are not implemented, sizes that do not fit together. The message is one line.
    """

    def __init__(self, config: PretrainedConfig, hidden_size: int, prefix: str) -> None:
        super().__init__()
        _check_supported(config, hidden_size)
        self.merge, self.patch, self.channels = config.spatial_merge_size, config.patch_size, config.in_channels
        self.frames, self.hidden_size, self.out_size = config.temporal_patch_size, config.hidden_size, hidden_size
        self.side = math.isqrt(config.num_position_embeddings)
        self.mean, self.std = list(config.image_mean), list(config.image_std)
        self.head_dim = config.hidden_size // config.num_heads
        self.theta = float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", DEFAULT_THETA))
        # A picture is one frame seen `frames` times, so the frames' weights are added up; in float32, because the sum
        # of two half-precision weights is none.
        self.patch_weight = _parameter(config.hidden_size, self.channels * self.patch**2, dtype=torch.float32)
        self.patch_bias = _parameter(config.hidden_size, dtype=torch.float32)
        self.pos_embed = _parameter(config.num_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(_Block(config, f"{prefix}.blocks.{index}") for index in range(config.depth))
        merged = config.hidden_size * self.merge**2
        self.norm = _LayerNorm(config.hidden_size)
        self.merger = _MLP(merged, merged, hidden_size, "none", f"{prefix}.merger")

    def forward(self, pixels: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
        """Returns the pictures' embeddings, [h w / merge^2, hidden size of the language model] each, in the model's
        dtype and on its device, in the order of the merged squares.

        Args:
            pixels: per picture uint8 [h w, channels, patch, patch] on any device, rows in the order of merged squares,
                before rescaling and normalisation.
            grids: per picture (h, w) in patches, multiples of the merge size.

        Raises:
            ValueError: pixels that do not fit their grid.
        """
        for picture, grid in zip(pixels, grids, strict=True):
            self._check(picture, grid)
        found: list[torch.Tensor] = []
        for group in batches([h * w for h, w in grids]):
            found += self._batch(pixels[group], grids[group])
        return found

    def _check(self, pixels: torch.Tensor, grid: Grid) -> None:
        shape = (grid[0] * grid[1], self.channels, self.patch, self.patch)
        if grid[0] < 1 or grid[1] < 1 or grid[0] % self.merge or grid[1] % self.merge:
            raise ValueError(f"a picture's grid is {grid[0]} x {grid[1]} patches, no multiples of {self.merge}")
        if tuple(pixels.shape) != shape or pixels.dtype != torch.uint8:
            raise ValueError(f"a picture of {grid[0]} x {grid[1]} patches has pixels {tuple(pixels.shape)} of "
                             f"{pixels.dtype}, not {shape} of torch.uint8")

    def _batch(self, pixels: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
        borders = [0, *accumulate(h * w for h, w in grids)]
        places = torch.cat([self._places(*grid) for grid in grids])
        x = self.patch_weight.new_empty(borders[-1], self.hidden_size)
        for start, picture, grid in zip(borders, pixels, grids, strict=False):
            for piece in _pieces(picture.shape[0]):
                rows = slice(start + piece.start, start + piece.stop)
                x[rows] = self._embed_patches(picture[piece]).add_(self._position_embeddings(places[rows], grid))
        rotation = self._rotation(places)
        for block in self.blocks:
            block(x, borders, rotation)
        square = self.merge**2
        out = torch.cat([self._merge(x[piece]) for piece in _pieces(x.shape[0], PIECE_ROWS // square * square)])
        return list(out.split([h * w // square for h, w in grids]))

    def _places(self, height: int, width: int) -> torch.Tensor:
        """Returns int64 [h w, 2]: row and column of each patch, merged square by merged square."""
        device, merge = self.pos_embed.device, self.merge
        cells = torch.arange(height * width, device=device).view(height // merge, merge, width // merge, merge)
        cells = cells.transpose(1, 2).reshape(-1)
        return torch.stack((torch.div(cells, width, rounding_mode="floor"), cells % width), dim=1)

    def _embed_patches(self, pixels: torch.Tensor) -> torch.Tensor:
        """Returns float32 [N, hidden size of the tower]."""
        values = pixels.to(self.patch_weight.device).float().div_(255)
        mean, std = (values.new_tensor(numbers).view(-1, 1, 1) for numbers in (self.mean, self.std))
        return F.linear(values.sub_(mean).div_(std).flatten(1), self.patch_weight, self.patch_bias)

    def _position_embeddings(self, places: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Returns float32 [N, hidden size of the tower]: the learned square stretched over the grid, corner on corner,
        linearly between its four nearest entries."""
        sizes = places.new_tensor([max(1, size - 1) for size in grid])
        where = places.float() * (self.side - 1) / sizes
        before = where.floor()
        share = where - before
        first = before.long()
        second = (first + 1).clamp_max(self.side - 1)
        total = self.patch_weight.new_zeros(places.shape[0], self.hidden_size)
        for row, row_share in ((first[:, 0], 1 - share[:, 0]), (second[:, 0], share[:, 0])):
            for column, column_share in ((first[:, 1], 1 - share[:, 1]), (second[:, 1], share[:, 1])):
                entries = self.pos_embed[row * self.side + column].float()
                total.add_(entries.mul_((row_share * column_share)[:, None]))
        return total

    def _rotation(self, places: torch.Tensor) -> Rotation:
        """The first half of a head's angles turn with the row, the second half with the column."""
        count = self.head_dim // 4
        exponents = torch.arange(count, dtype=torch.float32, device=places.device) / count
        angles = (places.float()[:, :, None] * (1.0 / self.theta**exponents)).flatten(1)
        return Rotation(angles.cos(), angles.sin())

    def _merge(self, x: torch.Tensor) -> torch.Tensor:
        return self.merger(self.norm(x, self.pos_embed.dtype).view(-1, self.hidden_size * self.merge**2))

    def wanted(self, name: str) -> Iterable[Wanted]:
        """The checkpoint tensors of the tower, whose name there is `name`."""
        shape = (self.hidden_size, self.channels, self.frames, self.patch, self.patch)
        yield Wanted(f"{name}.patch_embed.proj.weight", shape, self._load_patch_weight)
        yield copied(f"{name}.patch_embed.proj.bias", self.patch_bias)
        yield copied(f"{name}.pos_embed.weight", self.pos_embed)
        for index, block in enumerate(self.blocks):
            yield from block.wanted(f"{name}.blocks.{index}")
        yield from self.norm.wanted(f"{name}.merger.norm")
        yield from self.merger.wanted(f"{name}.merger")

    def _load_patch_weight(self, tensor: torch.Tensor) -> None:
        self.patch_weight.data.copy_(tensor.float().sum(2).flatten(1))


class _Block(nn.Module):
    """One layer: full attention within each picture, then an MLP."""

    def __init__(self, config: PretrainedConfig, prefix: str) -> None:
        super().__init__()
        hidden, self.heads = config.hidden_size, config.num_heads
        self.hidden_size, self.head_dim = hidden, hidden // config.num_heads
        tp = get_tensor_model_parallel_world_size()
        split = config.num_heads % tp == 0
        self.local_heads = self.heads // tp if split else self.heads
        self.norm1, self.norm2 = _LayerNorm(hidden), _LayerNorm(hidden)
        self.qkv: LinearBase
        if split:
            self.qkv = QKVParallelLinear(hidden, self.head_dim, self.heads, prefix=f"{prefix}.attn.qkv")
        else:
            self.qkv = ReplicatedLinear(hidden, 3 * hidden, prefix=f"{prefix}.attn.qkv")
        self.proj = _row_parallel(hidden, hidden, split, f"{prefix}.attn.proj")
        self.mlp = _MLP(hidden, config.intermediate_size, hidden, "tanh", f"{prefix}.mlp")

    def forward(self, x: torch.Tensor, borders: Sequence[int], rotation: Rotation) -> None:
        """x: float32 [N, hidden], overwritten by the layer's output. borders: where the pictures begin, and N."""
        dtype = self.proj.weight.dtype
        qkv = x.new_empty(x.shape[0], 3, self.local_heads, self.head_dim, dtype=dtype)
        for piece in _pieces(x.shape[0]):
            q, k, v = self.qkv(self.norm1(x[piece], dtype))[0].view(-1, 3, self.local_heads, self.head_dim).unbind(1)
            qkv[piece, 0], qkv[piece, 1] = apply_rope(q, k, Rotation(rotation.cos[piece], rotation.sin[piece]))
            qkv[piece, 2] = v
        mixed = vision_attention(*qkv.unbind(1), borders, self.head_dim**-0.5).flatten(1)
        for piece in _pieces(x.shape[0]):
            x[piece] += self.proj(mixed[piece])[0]
            x[piece] += self.mlp(self.norm2(x[piece], dtype))

    def wanted(self, name: str) -> Iterable[Wanted]:
        """The checkpoint tensors of the layer, whose name there is `name`."""
        yield from self.norm1.wanted(f"{name}.norm1")
        yield from linear(f"{name}.attn.qkv", self.qkv, 3 * self.hidden_size, self.hidden_size)
        yield from linear(f"{name}.attn.proj", self.proj, self.hidden_size, self.hidden_size)
        yield from self.norm2.wanted(f"{name}.norm2")
        yield from self.mlp.wanted(f"{name}.mlp")


class _MLP(nn.Module):
    """Linear, GELU ("none": exact, "tanh": its approximation), linear."""

    def __init__(self, inputs: int, inner: int, outputs: int, approximate: str, prefix: str) -> None:
        super().__init__()
        self.sizes, self.approximate = (inputs, inner, outputs), approximate
        split = inner % get_tensor_model_parallel_world_size() == 0
        column = ColumnParallelLinear if split else ReplicatedLinear
        self.linear_fc1 = column(inputs, inner, prefix=f"{prefix}.linear_fc1")
        self.linear_fc2 = _row_parallel(inner, outputs, split, f"{prefix}.linear_fc2")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x)[0], approximate=self.approximate))[0]

    def wanted(self, name: str) -> Iterable[Wanted]:
        inputs, inner, outputs = self.sizes
        yield from linear(f"{name}.linear_fc1", self.linear_fc1, inner, inputs)
        yield from linear(f"{name}.linear_fc2", self.linear_fc2, outputs, inner)


class _LayerNorm(nn.Module):
    """LayerNorm of float32, rounded once."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = (_parameter(size, dtype=torch.float32) for _ in range(2))

    def forward(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, NORM_EPS).to(dtype)

    def wanted(self, name: str) -> Iterable[Wanted]:
        yield copied(f"{name}.weight", self.weight)
        yield copied(f"{name}.bias", self.bias)


def batches(patches: Sequence[int]) -> Iterator[slice]:
    """Slices of consecutive pictures of at most BATCH_PATCHES patches together; a larger picture is alone."""
    start = total = 0
    for index, count in enumerate(patches):
        if index > start and total + count > BATCH_PATCHES:
            yield slice(start, index)
            start, total = index, 0
        total += count
    if start < len(patches):
        yield slice(start, len(patches))


def activation_bytes(config: PretrainedConfig, hidden_size: int, patches: int, dtype: torch.dtype, ranks: int,
                     device_type: str) -> int:
    """Upper bound of the bytes that the tower takes beside its weights and the pixels for one batch of `patches`.

    Args:
        hidden_size: of the language model. ranks: tensor-parallel size. device_type: "cpu", "cuda".
    """
    half = torch.empty(0, dtype=dtype).element_size()
    hidden, merge = config.hidden_size, config.spatial_merge_size
    local = hidden // ranks if config.num_heads % ranks == 0 else hidden
    # Hidden state; q, k, v and mixed values; cos and sin; row and column; embeddings, twice while pieces are joined.
    per_patch = 4 * hidden + 4 * half * local + 4 * (hidden // config.num_heads) + 16
    per_patch += 2 * half * hidden_size // merge**2
    # Two values of every inner unit, normalised rows before and after rounding, one result.
    inner = max(2 * half * max(config.intermediate_size, hidden), 10 * half * local,
                8 * config.in_channels * config.patch_size**2)
    piece = min(patches, PIECE_ROWS) * (inner + (8 + 2 * half) * hidden)
    return patches * per_patch + max(piece, 2 * score_bytes(device_type))


def _pieces(rows: int, step: int = PIECE_ROWS) -> Iterator[slice]:
    for at in range(0, rows, step):
        yield slice(at, min(at + step, rows))


def _parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def _row_parallel(inputs: int, outputs: int, split: bool, prefix: str) -> LinearBase:
    return RowParallelLinear(inputs, outputs, prefix=prefix) if split else ReplicatedLinear(
        inputs, outputs, prefix=prefix)


def _check_supported(config: PretrainedConfig, hidden_size: int) -> None:
    side = math.isqrt(config.num_position_embeddings)
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    deepstack = getattr(config, "deepstack_visual_indexes", None)
    if deepstack:
        raise ValueError(f"deepstack_visual_indexes {list(deepstack)} is not supported, only an empty list")
    if config.hidden_act != "gelu_pytorch_tanh":
        raise ValueError(f"hidden_act {config.hidden_act!r} of the vision tower is not supported, "
                         f"only 'gelu_pytorch_tanh'")
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope_type {rope_type!r} of the vision tower is not supported, only 'axial'")
    if config.hidden_size % config.num_heads or config.hidden_size // config.num_heads % 4:
        raise ValueError(f"hidden_size {config.hidden_size} of the vision tower in {config.num_heads} heads gives "
                         f"heads whose size is no multiple of 4")
    if side**2 != config.num_position_embeddings:
        raise ValueError(f"num_position_embeddings {config.num_position_embeddings} of the vision tower is no square")
    if config.out_hidden_size != hidden_size:
        raise ValueError(f"out_hidden_size {config.out_hidden_size} of the vision tower is not the language model's "
                         f"hidden_size {hidden_size}")
