"""The twin's forward pass for training: Qwen3.5 MoE over rows in which several chats lie one after another.

Mathematically the model of transformers (test_model.py compares), written out for speed at a few million parameters:
the experts are one dense product, the delta rule is delta_rule.c, and everything between compiles to one graph.
Parameters are a plain dict under the names of the published checkpoint. The embedding is the vocabulary head while
training.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from delta_rule import delta_rule
from torch import Tensor

Parameters = dict[str, Tensor]
TEXT, VISION, MTP = "model.language_model", "model.visual", "mtp"
EMBEDDING = f"{TEXT}.embed_tokens.weight"
# Queries that are multiplied at once: later keys are left out.
BLOCK = 256


class Rows(NamedTuple):
    """What the layers must know of packed rows [B, T]."""

    cos: Tensor  # [B, T, rotary dimensions] float32
    sin: Tensor
    fresh: Tensor  # [B, T] bool: first token of a chat
    taps: Tensor  # [B, T, width - 1] float32: 1 where the token s + 1 places before is of the same chat
    mask: Tensor  # [B, 1, T, T] additive


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every trained tensor."""
    text, vision = config["text_config"], config["vision_config"]
    hidden = text["hidden_size"]
    out = {EMBEDDING: (text["vocab_size"], hidden), f"{TEXT}.norm.weight": (hidden,)}
    for index, kind in enumerate(text["layer_types"]):
        out |= _layer(f"{TEXT}.layers.{index}", text, kind)
    out |= _layer(f"{MTP}.layers.0", text, "full_attention")
    out |= {f"{MTP}.{name}.weight": (hidden,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    out[f"{MTP}.fc.weight"] = (hidden, 2 * hidden)
    return out | _vision(vision)


def _layer(name: str, text: dict[str, Any], kind: str) -> dict[str, tuple[int, ...]]:
    hidden, inner, experts, shared = (
        text[key] for key in ("hidden_size", "moe_intermediate_size", "num_experts", "shared_expert_intermediate_size")
    )
    out: dict[str, tuple[int, ...]] = {
        f"{name}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")
    }
    if kind == "full_attention":
        head, heads, keys = text["head_dim"], text["num_attention_heads"], text["num_key_value_heads"]
        own = {
            "q_proj": (2 * heads * head, hidden),
            "k_proj": (keys * head, hidden),
            "v_proj": (keys * head, hidden),
            "o_proj": (hidden, heads * head),
            "q_norm": (head,),
            "k_norm": (head,),
        }
        out |= {f"{name}.self_attn.{key}.weight": shape for key, shape in own.items()}
    else:
        heads = text["linear_num_value_heads"]
        keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
        values = heads * text["linear_value_head_dim"]
        own = {
            "in_proj_qkv": (2 * keys + values, hidden),
            "in_proj_z": (values, hidden),
            "in_proj_b": (heads, hidden),
            "in_proj_a": (heads, hidden),
            "conv1d": (2 * keys + values, 1, text["linear_conv_kernel_dim"]),
            "norm": (text["linear_value_head_dim"],),
            "out_proj": (hidden, values),
        }
        out |= {f"{name}.linear_attn.{key}.weight": shape for key, shape in own.items()}
        out |= {f"{name}.linear_attn.A_log": (heads,), f"{name}.linear_attn.dt_bias": (heads,)}
    out |= {
        f"{name}.mlp.gate.weight": (experts, hidden),
        f"{name}.mlp.shared_expert_gate.weight": (1, hidden),
        f"{name}.mlp.experts.gate_up_proj": (experts, 2 * inner, hidden),
        f"{name}.mlp.experts.down_proj": (experts, hidden, inner),
        f"{name}.mlp.shared_expert.gate_proj.weight": (shared, hidden),
        f"{name}.mlp.shared_expert.up_proj.weight": (shared, hidden),
        f"{name}.mlp.shared_expert.down_proj.weight": (hidden, shared),
    }
    return out


def _vision(vision: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    merged = hidden * vision["spatial_merge_size"] ** 2

    def biased(name: str, rows: int, *columns: int) -> dict[str, tuple[int, ...]]:
        return {f"{VISION}.{name}.weight": (rows, *columns), f"{VISION}.{name}.bias": (rows,)}

    out = biased("patch_embed.proj", hidden, vision["in_channels"], vision["temporal_patch_size"], patch, patch)
    out[f"{VISION}.pos_embed.weight"] = (vision["num_position_embeddings"], hidden)
    for block in (f"blocks.{index}" for index in range(vision["depth"])):
        out |= biased(f"{block}.norm1", hidden) | biased(f"{block}.norm2", hidden)
        out |= biased(f"{block}.attn.qkv", 3 * hidden, hidden) | biased(f"{block}.attn.proj", hidden, hidden)
        out |= biased(f"{block}.mlp.linear_fc1", inner, hidden) | biased(f"{block}.mlp.linear_fc2", hidden, inner)
    return (
        out
        | biased("merger.norm", hidden)
        | biased("merger.linear_fc1", merged, merged)
        | biased("merger.linear_fc2", vision["out_hidden_size"], merged)
    )


def initial(config: dict[str, Any], seed: int) -> Parameters:
    """Fresh float32 parameters. Norms are the identity; the delta rule forgets within one to a thousand tokens."""
    generator = torch.Generator().manual_seed(seed)
    out: Parameters = {}
    depth = 2 * config["text_config"]["num_hidden_layers"]
    for name, shape in shapes(config).items():
        leaf = name.split(".")[-2 if name.endswith((".weight", ".bias")) else -1]
        if name.endswith("A_log"):
            value = torch.empty(shape).uniform_(1, 16, generator=generator).log()
        elif name.endswith("dt_bias"):
            steps = torch.empty(shape).uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp()
            value = steps + torch.log(-torch.expm1(-steps))
        elif name.endswith("linear_attn.norm.weight") or (name.startswith(VISION) and leaf.startswith("norm")):
            value = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        elif len(shape) == 1:
            value = torch.zeros(shape)
        elif leaf == "embed_tokens":
            value = torch.empty(shape).normal_(0, 0.05, generator=generator)
        elif leaf == "pos_embed":
            value = torch.empty(shape).normal_(0, 0.2, generator=generator)
        else:
            inputs = shape[-1] if leaf in ("gate_up_proj", "down_proj") or len(shape) == 2 else math.prod(shape[1:])
            value = torch.empty(shape).normal_(0, inputs**-0.5, generator=generator)
            if leaf in ("o_proj", "out_proj", "down_proj"):
                value *= depth**-0.5
        out[name] = value
    return out


def rotary(text: dict[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
    """positions: [3, ...] (time, height, width) -> cos, sin [..., rotary dimensions]."""
    settings = text["rope_parameters"]
    size = int(text["head_dim"] * settings["partial_rotary_factor"])
    inverse = 1.0 / settings["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = positions.float()[..., None] * inverse
    mixed = angles[0].clone()
    for dimension in (1, 2):
        chosen = slice(dimension, settings["mrope_section"][dimension] * 3, 3)
        mixed[..., chosen] = angles[dimension, ..., chosen]
    mixed = torch.cat((mixed, mixed), dim=-1)
    return mixed.cos(), mixed.sin()


def rows_of(config: dict[str, Any], chats: Tensor, positions: Tensor, dtype: torch.dtype) -> Rows:
    """chats: [B, T] number of the chat of each token. positions: [3, B, T]. dtype: of the attention mask."""
    text = config["text_config"]
    fresh = torch.ones_like(chats, dtype=torch.bool)
    fresh[:, 1:] = chats[:, 1:] != chats[:, :-1]
    taps = torch.zeros(*chats.shape, text["linear_conv_kernel_dim"] - 1)
    for back in range(1, text["linear_conv_kernel_dim"]):
        taps[:, back:, back - 1] = (chats[:, back:] == chats[:, :-back]).float()
    allowed = (chats[:, :, None] == chats[:, None, :]).tril()
    mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, float("-inf"))[:, None]
    return Rows(*rotary(text, positions), fresh, taps, mask)


class Network:
    """The layers for one configuration; multiplications in `dtype`, everything else in float32."""

    def __init__(self, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
        self.text, self.vision, self.dtype = config["text_config"], config["vision_config"], dtype
        self.eps = self.text["rms_norm_eps"]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = F.linear(x.to(self.dtype), weight.to(self.dtype))
        return out if bias is None else out + bias

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + weight)

    def trunk(self, p: Parameters, x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """x: [B, T, hidden] embeddings -> normalised hidden states, and how uneven the experts' use is (1 = even)."""
        uneven = x.new_zeros(())
        for index, kind in enumerate(self.text["layer_types"]):
            x, more = self.layer(p, f"{TEXT}.layers.{index}", kind, x, rows)
            uneven = uneven + more / len(self.text["layer_types"])
        return self.norm(x, p[f"{TEXT}.norm.weight"]), uneven

    def mtp(self, p: Parameters, hidden: Tensor, following: Tensor, rows: Rows) -> Tensor:
        """hidden: of token i; following: embedding of token i + 1 -> state that gives token i + 2. [B, T, hidden]."""
        both = torch.cat(
            (
                self.norm(following, p[f"{MTP}.pre_fc_norm_embedding.weight"]),
                self.norm(hidden, p[f"{MTP}.pre_fc_norm_hidden.weight"]),
            ),
            dim=-1,
        )
        x = self.linear(both, p[f"{MTP}.fc.weight"]).float()
        x, _ = self.layer(p, f"{MTP}.layers.0", "full_attention", x, rows)
        return self.norm(x, p[f"{MTP}.norm.weight"])

    def layer(self, p: Parameters, name: str, kind: str, x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        mixed = self.norm(x, p[f"{name}.input_layernorm.weight"])
        x = x + (
            self.attention(p, f"{name}.self_attn", mixed, rows)
            if kind == "full_attention"
            else self.delta_net(p, f"{name}.linear_attn", mixed, rows)
        )
        update, uneven = self.experts(p, f"{name}.mlp", self.norm(x, p[f"{name}.post_attention_layernorm.weight"]))
        return x + update, uneven

    def attention(self, p: Parameters, name: str, x: Tensor, rows: Rows) -> Tensor:
        batch, tokens, _ = x.shape
        head, heads, keys = (self.text[key] for key in ("head_dim", "num_attention_heads", "num_key_value_heads"))
        q, gate = self.linear(x, p[f"{name}.q_proj.weight"]).view(batch, tokens, heads, 2 * head).chunk(2, dim=-1)
        k, v = (self.linear(x, p[f"{name}.{letter}_proj.weight"]).view(batch, tokens, keys, head) for letter in "kv")
        q, k = (
            self.rotate(self.norm(part, p[f"{name}.{letter}_norm.weight"]), rows)
            for part, letter in ((q, "q"), (k, "k"))
        )
        q, k, v = (part.to(self.dtype).transpose(1, 2) for part in (q, k, v))
        k, v = (part.repeat_interleave(heads // keys, dim=1) for part in (k, v))
        # torch's own attention with a mask spends eight times as long in its backward pass as forward.
        parts = []
        for first in range(0, tokens, BLOCK):
            last = min(first + BLOCK, tokens)
            scores = (q[:, :, first:last] @ k[:, :, :last].mT).float() * head**-0.5 + rows.mask[:, :, first:last, :last]
            parts.append(scores.softmax(-1).to(self.dtype) @ v[:, :, :last])
        out = torch.cat(parts, dim=2).transpose(1, 2)
        return self.linear((out * torch.sigmoid(gate.float())).reshape(batch, tokens, -1), p[f"{name}.o_proj.weight"])

    def rotate(self, x: Tensor, rows: Rows) -> Tensor:
        size = rows.cos.shape[-1]
        cos, sin = rows.cos[:, :, None], rows.sin[:, :, None]
        turned, rest = x[..., :size], x[..., size:]
        first, second = turned.chunk(2, dim=-1)
        return torch.cat((turned * cos + torch.cat((-second, first), dim=-1) * sin, rest), dim=-1)

    def delta_net(self, p: Parameters, name: str, x: Tensor, rows: Rows) -> Tensor:
        batch, tokens, _ = x.shape
        heads, size = self.text["linear_num_value_heads"], self.text["linear_key_head_dim"]
        keys = self.text["linear_num_key_heads"] * size
        mixed = self.linear(x, p[f"{name}.in_proj_qkv.weight"]).float()
        kernel = p[f"{name}.conv1d.weight"][:, 0]
        width = kernel.shape[1]
        total = mixed * kernel[:, -1]
        for back in range(1, width):
            shifted = F.pad(mixed, (0, 0, back, 0))[:, :tokens]
            total = total + shifted * rows.taps[:, :, back - 1, None] * kernel[:, width - 1 - back]
        q, k, v = F.silu(total).split((keys, keys, total.shape[-1] - 2 * keys), dim=-1)
        q, k = (part.reshape(batch, tokens, -1, size) for part in (q, k))
        q, k = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + 1e-6) for part in (q, k))
        beta = self.linear(x, p[f"{name}.in_proj_b.weight"]).float().sigmoid()
        step = F.softplus(self.linear(x, p[f"{name}.in_proj_a.weight"]).float() + p[f"{name}.dt_bias"])
        decay = -p[f"{name}.A_log"].exp() * step
        out, _ = delta_rule(
            (q * size**-0.5).contiguous(),
            k.contiguous(),
            v.reshape(batch, tokens, heads, -1).contiguous(),
            decay.contiguous(),
            beta.contiguous(),
            rows.fresh,
        )
        z = self.linear(x, p[f"{name}.in_proj_z.weight"]).float().view(out.shape)
        out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + self.eps) * p[f"{name}.norm.weight"] * F.silu(z)
        return self.linear(out.reshape(batch, tokens, -1), p[f"{name}.out_proj.weight"])

    def experts(self, p: Parameters, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        count, chosen = self.text["num_experts"], self.text["num_experts_per_tok"]
        share = F.linear(x, p[f"{name}.gate.weight"]).softmax(-1)
        lowest = share.topk(chosen, dim=-1).values[..., -1:]
        picked = (share >= lowest).float()
        weights = share * picked
        weights = weights / weights.sum(-1, keepdim=True)
        up, down = p[f"{name}.experts.gate_up_proj"], p[f"{name}.experts.down_proj"]
        gate, value = self.linear(x, up.flatten(0, 1)).unflatten(-1, (count, 2, -1)).float().unbind(-2)
        inner = F.silu(gate) * value * weights[..., None]
        routed = self.linear(inner.flatten(-2), down.transpose(0, 1).flatten(1))
        gate, value = (self.linear(x, p[f"{name}.shared_expert.{part}_proj.weight"]).float() for part in ("gate", "up"))
        shared = self.linear(F.silu(gate) * value, p[f"{name}.shared_expert.down_proj.weight"])
        shared = shared * self.linear(x, p[f"{name}.shared_expert_gate.weight"]).float().sigmoid()
        uneven = count / chosen * (picked.mean((0, 1)) * share.mean((0, 1))).sum()
        return routed + shared, uneven

    def picture(self, p: Parameters, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """patches: [h * w, 3 * 2 * 16 * 16] float32, merged neighbours together -> embeddings [h * w / 4, hidden]."""
        vision = self.vision
        heads, hidden, merge = vision["num_heads"], vision["hidden_size"], vision["spatial_merge_size"]
        x = self.linear(
            patches, p[f"{VISION}.patch_embed.proj.weight"].flatten(1), p[f"{VISION}.patch_embed.proj.bias"]
        )
        places = block_order(*grid, merge)
        x = x + resampled(p[f"{VISION}.pos_embed.weight"], grid, places)
        half = hidden // heads // 2
        inverse = 1.0 / 10000.0 ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
        angles = (places[:, :, None].float() * inverse).flatten(1)
        cos, sin = (torch.cat((f, f), dim=-1)[:, None] for f in (angles.cos(), angles.sin()))
        for index in range(vision["depth"]):
            block = f"{VISION}.blocks.{index}"
            qkv = (
                self.linear(
                    self.layer_norm(p, f"{block}.norm1", x), p[f"{block}.attn.qkv.weight"], p[f"{block}.attn.qkv.bias"]
                )
                .float()
                .view(-1, 3, heads, hidden // heads)
            )
            q, k, v = qkv.unbind(1)
            q, k = (part * cos + torch.cat((-part[..., half:], part[..., :half]), dim=-1) * sin for part in (q, k))
            out = F.scaled_dot_product_attention(*(part.to(self.dtype).transpose(0, 1)[None] for part in (q, k, v)))
            x = x + self.linear(
                out[0].transpose(0, 1).flatten(1), p[f"{block}.attn.proj.weight"], p[f"{block}.attn.proj.bias"]
            )
            inner = self.linear(
                self.layer_norm(p, f"{block}.norm2", x),
                p[f"{block}.mlp.linear_fc1.weight"],
                p[f"{block}.mlp.linear_fc1.bias"],
            )
            x = x + self.linear(
                F.gelu(inner, approximate="tanh"),
                p[f"{block}.mlp.linear_fc2.weight"],
                p[f"{block}.mlp.linear_fc2.bias"],
            )
        x = self.layer_norm(p, f"{VISION}.merger.norm", x).reshape(-1, hidden * merge * merge)
        inner = F.gelu(self.linear(x, p[f"{VISION}.merger.linear_fc1.weight"], p[f"{VISION}.merger.linear_fc1.bias"]))
        return self.linear(
            inner, p[f"{VISION}.merger.linear_fc2.weight"], p[f"{VISION}.merger.linear_fc2.bias"]
        ).float()

    def layer_norm(self, p: Parameters, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"], 1e-6)


def block_order(height: int, width: int, merge: int) -> Tensor:
    """[height * width, 2] row and column of each patch, merge x merge neighbours after one another."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    both = torch.stack((rows, columns), dim=-1).view(height // merge, merge, width // merge, merge, 2)
    return both.transpose(1, 2).reshape(-1, 2)


def resampled(table: Tensor, grid: tuple[int, int], places: Tensor) -> Tensor:
    """The square table of learned positions at `places` of a grid, bilinear with the corners aligned."""
    side = math.isqrt(table.shape[0])
    out: Tensor | None = None
    # As transformers does it: the coordinate in the table is linspace(0, side - 1, length of the grid).
    along = [torch.linspace(0, side - 1, length)[places[:, axis]] for axis, length in enumerate(grid)]
    low = [line.floor().long().clamp(max=side - 1) for line in along]
    part = [line - floor for line, floor in zip(along, low, strict=True)]
    for down in (0, 1):
        for right in (0, 1):
            row, column = (low[0] + down).clamp(max=side - 1), (low[1] + right).clamp(max=side - 1)
            weight = (part[0] if down else 1 - part[0]) * (part[1] if right else 1 - part[1])
            term = table[row * side + column] * weight[:, None]
            out = term if out is None else out + term
    assert out is not None
    return out
