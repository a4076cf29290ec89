"""Qwen3.5 / Qwen3.6 hybrid models: Gated DeltaNet and gated full attention, dense or mixture of experts, with pictures.

The vision tower stands in vllm.overlay.model.vision, the multi-token-prediction head in vllm.overlay.model.mtp; its
weights are skipped with a line that says so unless VLLM_OVERLAY_MTP=1 asks for it. Sources: the published
configuration, and Hugging Face transformers 5 (models/qwen3_5_moe), which the tests compare with. Gated DeltaNet: Yang,
Kautz, Hatamizadeh, arXiv 2412.06464.

Throughout, T is the number of tokens of the step, and sizes with "local" in their name are this tensor-parallel rank's.
"""
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from vllm.attention import Attention, AttentionMetadata
from vllm.config import CacheConfig
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.sampler import Sampler, SamplerOutput
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.sampling_metadata import SamplingMetadata
from vllm.overlay.hybrid import StatePool, StateSpec, get_state_step
from vllm.overlay.kernels.causal_conv1d import causal_conv1d
from vllm.overlay.kernels.gated_delta_rule import gate, gated_delta_rule
from vllm.overlay.kernels.int8_weights import int8_experts
from vllm.overlay.kernels.int8_weights import pack as pack_int8
from vllm.overlay.kernels.moe import experts, route
from vllm.overlay.kernels.moe import pack as pack_experts
from vllm.overlay.kernels.norms import gated_rms_norm, rms_norm
from vllm.overlay.kernels.rope import RotaryTable, Rotation, apply_rope
from vllm.overlay.model import int8
from vllm.overlay.model.checkpoint import (
    Wanted,
    Weights,
    copied,
    filler,
    linear,
    load_checkpoint,
    rank_cut,
    split,
    vocabulary,
)
from vllm.overlay.model.linear_method import use_linear_operator
from vllm.overlay.model.mtp_switch import MTP_ASKED, mtp_is_asked
from vllm.overlay.model.packing import exchange
from vllm.overlay.model.shards import Shards
from vllm.overlay.model.vision import VisionTower
from vllm.overlay.pictures.picture_step import get_picture_step
from vllm.overlay.runtime.moe_summary import MoeSummary
from vllm.sequence import IntermediateTensors
from vllm.transformers_utils.configs.qwen3_5 import FULL_ATTENTION, LINEAR_ATTENTION

logger = init_logger(__name__)

MTP_PREFIX = "mtp."
# Prefixes of the vision tower's tensors: (in some checkpoints, in the published ones).
VISION_PREFIX = ("visual.", "model.visual.")
NO_TOWER = "only a ...ForConditionalGeneration architecture with a vision_config takes pictures"
# Checkpoints with a vision tower put the language model under the first prefix, text-only ones under the second.
TEXT_PREFIX = ("model.language_model.", "model.")


class Rows(NamedTuple):
    """The step's rows as the stateful operators want them (vllm.overlay.kernels.rows), and where their state lives.

    pool: None where the step has no state, as when memory is profiled: every row then starts from zero, and its state
    is forgotten. context_lens: host ints, per row the position of its first token; None where not known.
    """
    pool: StatePool | None
    live_slots: torch.Tensor
    query_start_loc: Sequence[int]
    num_prefills: int
    captures: Sequence[tuple[int, int, int]]
    context_lens: list[int] | None


class RMSNorm(nn.Module):
    """Gemma style: multiplies by 1 + weight. With a residual it returns (normalised, x + residual)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        return rms_norm(x, self.weight, self.eps, residual)


class Qwen3_5GatedDeltaNet(nn.Module):
    """The recurrent layer. Ranks take whole key heads, each with the value heads that read it.

    Args:
        state_layer: this layer's place among the recurrent layers, which is its place in the state pool.
    """

    def __init__(self, config: PretrainedConfig, state_layer: int, quant_config: QuantizationConfig | None,
                 prefix: str) -> None:
        super().__init__()
        tp = get_tensor_model_parallel_world_size()
        self.state_layer = state_layer
        self.hidden_size = config.hidden_size
        self.eps = config.rms_norm_eps
        self.key_size, self.value_size = config.linear_key_head_dim, config.linear_value_head_dim
        self.value_heads = config.linear_num_value_heads
        self.local_key_heads, self.local_value_heads = config.linear_num_key_heads // tp, self.value_heads // tp
        keys, values = config.linear_num_key_heads * self.key_size, self.value_heads * self.value_size
        self.sections = [keys, keys, values]
        self.local_sections = [size // tp for size in self.sections]
        self.width = config.linear_conv_kernel_dim

        self.in_proj_qkvz = MergedColumnParallelLinear(config.hidden_size, [keys, keys, values, values],
                                                       bias=False,
                                                       quant_config=quant_config,
                                                       prefix=f"{prefix}.in_proj_qkvz")
        # Two rows per head: not worth quantising, and published quantised checkpoints leave them alone.
        self.in_proj_ba = MergedColumnParallelLinear(config.hidden_size, [self.value_heads, self.value_heads],
                                                     bias=False,
                                                     prefix=f"{prefix}.in_proj_ba")
        self.conv_weight = nn.Parameter(torch.empty(sum(self.local_sections), self.width), requires_grad=False)
        self.A_log = nn.Parameter(torch.empty(self.local_value_heads, dtype=torch.float32), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(self.local_value_heads, dtype=torch.float32), requires_grad=False)
        self.norm_weight = nn.Parameter(torch.empty(self.value_size, dtype=torch.float32), requires_grad=False)
        self.out_proj = RowParallelLinear(values,
                                          config.hidden_size,
                                          bias=False,
                                          quant_config=quant_config,
                                          prefix=f"{prefix}.out_proj")

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        """x: [T, hidden] -> [T, hidden]. The rows' state moves forward in place."""
        tokens = x.shape[0]
        conv, recurrent = self._state(rows, x)
        qkvz, _ = self.in_proj_qkvz(x)
        ba, _ = self.in_proj_ba(x)
        channels = sum(self.local_sections)
        # Each is let go when it has been used: in a long step they are most of what it needs beside the weights.
        z = qkvz[:, channels:].contiguous().view(tokens, self.local_value_heads, self.value_size)
        mixed = qkvz[:, :channels].contiguous()
        del qkvz
        b, a = ba.split(self.local_value_heads, dim=-1)
        mixed = causal_conv1d(mixed, self.conv_weight, None, conv, rows.live_slots, rows.query_start_loc,
                              rows.num_prefills, rows.captures)
        q, k, v = mixed.split(self.local_sections, dim=-1)
        g, beta = gate(a.contiguous(), b.contiguous(), self.A_log, self.dt_bias)
        o = gated_delta_rule(q.view(tokens, self.local_key_heads, self.key_size),
                             k.view(tokens, self.local_key_heads, self.key_size),
                             v.view(tokens, self.local_value_heads, self.value_size), g, beta, recurrent,
                             rows.live_slots, rows.query_start_loc, rows.num_prefills, rows.captures,
                             rows.context_lens)
        del mixed, q, k, v
        y = gated_rms_norm(o, z, self.norm_weight, self.eps)
        out, _ = self.out_proj(y.reshape(tokens, -1))
        return out

    def _state(self, rows: Rows, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if rows.pool is not None:
            return rows.pool.conv[self.state_layer], rows.pool.recurrent[self.state_layer]
        count = len(rows.query_start_loc) - 1
        return (x.new_zeros(count, sum(self.local_sections), self.width - 1),
                x.new_zeros(count, self.local_value_heads, self.key_size, self.value_size, dtype=torch.float32))

    def wanted(self, name: str) -> Iterable[Wanted]:
        """The checkpoint tensors of this layer, whose name there is `name`."""
        yield from linear(f"{name}.in_proj_qkv", self.in_proj_qkvz, sum(self.sections), self.hidden_size, 0, 1, 2)
        yield from linear(f"{name}.in_proj_z", self.in_proj_qkvz, self.sections[2], self.hidden_size, 3)
        yield from linear(f"{name}.in_proj_b", self.in_proj_ba, self.value_heads, self.hidden_size, 0)
        yield from linear(f"{name}.in_proj_a", self.in_proj_ba, self.value_heads, self.hidden_size, 1)
        keys = self.sections[0]
        yield Wanted(f"{name}.conv1d.weight", (sum(self.sections), 1, self.width), self._load_conv,
                     cuts=(rank_cut(0, keys), rank_cut(0, keys, keys), rank_cut(0, self.sections[2], 2 * keys)))
        yield split(f"{name}.A_log", (self.value_heads, ), 0, self.A_log.data.copy_)
        yield split(f"{name}.dt_bias", (self.value_heads, ), 0, self.dt_bias.data.copy_)
        yield copied(f"{name}.norm.weight", self.norm_weight)
        yield from linear(f"{name}.out_proj", self.out_proj, self.hidden_size, self.sections[2])

    def _load_conv(self, *sections: torch.Tensor) -> None:
        self.conv_weight.data.copy_(torch.cat(sections).squeeze(1))


class Qwen3_5Attention(nn.Module):
    """Full attention with a per-head norm of q and k, partial rotary embedding and a sigmoid gate on the output."""

    def __init__(self, config: PretrainedConfig, cache_config: CacheConfig | None,
                 quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        tp = get_tensor_model_parallel_world_size()
        self.hidden_size, self.head_dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.local_heads, self.local_kv_heads = self.heads // tp, max(1, self.kv_heads // tp)
        # The rows of q_proj are, per head, the query and then the gate: to stock that is twice as many heads.
        self.qkv_proj = QKVParallelLinear(config.hidden_size,
                                          self.head_dim,
                                          2 * self.heads,
                                          self.kv_heads,
                                          bias=config.attention_bias,
                                          quant_config=quant_config,
                                          prefix=f"{prefix}.qkv_proj")
        self.o_proj = RowParallelLinear(self.heads * self.head_dim,
                                        config.hidden_size,
                                        bias=config.attention_bias,
                                        quant_config=quant_config,
                                        prefix=f"{prefix}.o_proj")
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.attn = Attention(self.local_heads,
                              self.head_dim,
                              self.head_dim**-0.5,
                              num_kv_heads=self.local_kv_heads,
                              cache_config=cache_config,
                              prefix=f"{prefix}.attn")

    def forward(self, x: torch.Tensor, rotation: Rotation, kv_cache: torch.Tensor | None,
                attn_metadata: AttentionMetadata) -> torch.Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        tokens = x.shape[0]
        qkv, _ = self.qkv_proj(x)
        kv_size = self.local_kv_heads * self.head_dim
        q_gate, k, v = qkv.split([2 * self.local_heads * self.head_dim, kv_size, kv_size], dim=-1)
        q, output_gate = q_gate.reshape(tokens, self.local_heads, 2, self.head_dim).unbind(2)
        q = self.q_norm(q.contiguous())
        k = self.k_norm(k.reshape(tokens, self.local_kv_heads, self.head_dim))
        q, k = apply_rope(q, k, rotation)
        out = self.attn(q.view(tokens, -1), k.view(tokens, -1), v.contiguous(), kv_cache, attn_metadata)
        out, _ = self.o_proj(out.view(tokens, -1).mul_(output_gate.reshape(tokens, -1).sigmoid_()))
        return out

    def wanted(self, name: str) -> Iterable[Wanted]:
        """The checkpoint tensors of this layer, whose name there is `name`."""
        size = self.head_dim
        for shard, rows in (("q", 2 * self.heads * size), ("k", self.kv_heads * size), ("v", self.kv_heads * size)):
            yield from linear(f"{name}.{shard}_proj", self.qkv_proj, rows, self.hidden_size, shard)
        yield from linear(f"{name}.o_proj", self.o_proj, self.hidden_size, self.heads * size)
        yield copied(f"{name}.q_norm.weight", self.q_norm.weight)
        yield copied(f"{name}.k_norm.weight", self.k_norm.weight)


class Qwen3_5MLP(nn.Module):
    """SwiGLU. reduce: whether the ranks' results are summed here; else the caller does it."""

    def __init__(self, hidden_size: int, intermediate_size: int, reduce: bool,
                 quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [intermediate_size, intermediate_size],
                                                       bias=False,
                                                       quant_config=quant_config,
                                                       prefix=f"{prefix}.gate_up_proj")
        self.down_proj = RowParallelLinear(intermediate_size,
                                           hidden_size,
                                           bias=False,
                                           reduce_results=reduce,
                                           quant_config=quant_config,
                                           prefix=f"{prefix}.down_proj")
        self.act = SiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        gate_up, _ = self.gate_up_proj(x)
        # Stock's CPU operator takes multiples of 8 only.
        inner = self.act.forward_native(gate_up) if x.device.type == "cpu" else self.act(gate_up)
        out, _ = self.down_proj(inner)
        return out

    def wanted(self, name: str) -> Iterable[Wanted]:
        """The checkpoint tensors of this layer, whose name there is `name`."""
        for shard, key in enumerate(("gate_proj", "up_proj")):
            yield from linear(f"{name}.{key}", self.gate_up_proj, self.intermediate_size, self.hidden_size, shard)
        yield from linear(f"{name}.down_proj", self.down_proj, self.hidden_size, self.intermediate_size)


class Qwen3_5SparseMoe(nn.Module):
    """Routed experts and one gated shared expert. Ranks split every expert's inner size and share one all-reduce.

    moe_summary: set by the worker where the pieces are to be measured; it then computes the layer from them.
    """
    moe_summary: MoeSummary | None = None

    def __init__(self, config: PretrainedConfig, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        hidden, count, self.inner = config.hidden_size, config.num_experts, config.moe_intermediate_size
        self.hidden_size, self.num_experts, self.top_k = hidden, count, config.num_experts_per_tok
        self.local_inner = self.inner // get_tensor_model_parallel_world_size()
        self.gate = ReplicatedLinear(hidden, count, bias=False, prefix=f"{prefix}.gate")
        self.shared_expert_gate = ReplicatedLinear(hidden, 1, bias=False, prefix=f"{prefix}.shared_expert_gate")
        shapes = (count, 2 * self.local_inner, hidden), (count, hidden, self.local_inner)
        if isinstance(quant_config, int8.Int8WeightOnlyConfig):
            (self.w13, self.w13_scale), (self.w2, self.w2_scale) = (int8.int8_parameters(*shape) for shape in shapes)
        else:
            self.w13, self.w2 = (nn.Parameter(torch.empty(shape), requires_grad=False) for shape in shapes)
            self.w13_scale = self.w2_scale = None
        self.shared_expert = Qwen3_5MLP(hidden, config.shared_expert_intermediate_size, False, quant_config,
                                        f"{prefix}.shared_expert")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        if self.moe_summary is not None:
            return self.moe_summary.forward(self, x)
        return self.all_reduce(self.routed(x, *self.choose(x)) + self.shared(x))

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [T, hidden] -> the experts' weights float32 [T, top_k] and ids int64 [T, top_k]."""
        router_logits, _ = self.gate(x)
        return route(router_logits, self.top_k)

    def routed(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden], weights and ids as chosen -> this rank's part of [T, hidden]."""
        if self.w13_scale is None:
            return experts(x, self.w13, self.w2, weights, ids)
        return int8_experts(x, self.w13, self.w13_scale, self.w2, self.w2_scale, weights, ids)

    def pack_weights(self) -> None:
        """See overlay/model/packing.py."""
        w13, w2, dtype = self.w13.data, self.w2.data, self.gate.params_dtype
        if self.w13_scale is None:
            packed = pack_experts(w13, w2)
        else:
            packed = (pack_int8(w13, self.local_inner, dtype), pack_int8(w2, self.hidden_size, dtype))
        for name, weight in zip(("w13", "w2"), packed, strict=True):
            exchange(self, name, weight)

    def shared(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden] -> this rank's part of [T, hidden]."""
        shared_gate, _ = self.shared_expert_gate(x)
        return torch.sigmoid(shared_gate) * self.shared_expert(x)

    def all_reduce(self, out: torch.Tensor) -> torch.Tensor:
        """[T, hidden]: the sum of all ranks' parts."""
        return tensor_model_parallel_all_reduce(out)

    def wanted(self, name: str) -> Iterable[Wanted]:
        """The checkpoint tensors of this layer, whose name there is `name`; the routed experts joined or one by one."""
        yield from linear(f"{name}.gate", self.gate, self.num_experts, self.hidden_size)
        yield from linear(f"{name}.shared_expert_gate", self.shared_expert_gate, 1, self.hidden_size)
        yield from self.shared_expert.wanted(f"{name}.shared_expert")
        count, inner, hidden = self.num_experts, self.inner, self.hidden_size
        gates, ups = zip(self._halves(self.w13), self._halves(self.w13_scale), strict=True)
        w2 = self.w2.data, None if self.w2_scale is None else self.w2_scale.data
        yield Wanted(
            f"{name}.experts.gate_up_proj", (count, 2 * inner, hidden), self._load_gate_up,
            tuple(
                split(f"{name}.experts.{expert}.{key}.weight", (inner, hidden), 0, _expert_filler(place, expert))
                for expert in range(count) for key, place in (("gate_proj", gates), ("up_proj", ups))),
            cuts=(rank_cut(1, inner), rank_cut(1, inner, inner)))
        yield Wanted(
            f"{name}.experts.down_proj", (count, hidden, inner), filler(*w2),
            tuple(
                split(f"{name}.experts.{expert}.down_proj.weight", (hidden, inner), 1, _expert_filler(w2, expert))
                for expert in range(count)),
            cuts=(rank_cut(2, inner), ))

    def _halves(self, param: nn.Parameter | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return (None, None) if param is None else param.data.split(self.local_inner, dim=1)

    def _load_gate_up(self, *pieces: torch.Tensor) -> None:
        for half, scale, piece in zip(self._halves(self.w13), self._halves(self.w13_scale), pieces, strict=True):
            filler(half, scale)(piece)


class Qwen3_5DecoderLayer(nn.Module):
    """One layer. `is_attention` tells which of the two mixers it has.

    Args:
        layer: its place in the decoder; None for one of the multi-token-prediction head, which have full attention.
    """

    def __init__(self, config: PretrainedConfig, layer: int | None, cache_config: CacheConfig | None,
                 quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        self.is_attention = layer is None or config.layer_types[layer] == FULL_ATTENTION
        if self.is_attention:
            self.self_attn = Qwen3_5Attention(config, cache_config, quant_config, f"{prefix}.self_attn")
        else:
            self.linear_attn = Qwen3_5GatedDeltaNet(config, config.layer_types[:layer].count(LINEAR_ATTENTION),
                                                    quant_config, f"{prefix}.linear_attn")
        self.mlp: nn.Module
        if _is_moe(config):
            self.mlp = Qwen3_5SparseMoe(config, quant_config, f"{prefix}.mlp")
        else:
            self.mlp = Qwen3_5MLP(config.hidden_size, config.intermediate_size, True, quant_config, f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, residual: torch.Tensor, rotation: Rotation, kv_cache: torch.Tensor | None,
                attn_metadata: AttentionMetadata, rows: Rows | None) -> tuple[torch.Tensor, torch.Tensor]:
        """x + residual is the layer's input; the sum of the two results is its output. All [T, hidden]. rows: of the
        state, not used by a layer with attention."""
        x, residual = self.input_layernorm(x, residual)
        if self.is_attention:
            x = self.self_attn(x, rotation, kv_cache, attn_metadata)
        else:
            x = self.linear_attn(x, rows)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual

    def wanted(self, name: str) -> Iterable[Wanted]:
        """The checkpoint tensors of this layer, whose name there is `name`."""
        if self.is_attention:
            yield from self.self_attn.wanted(f"{name}.self_attn")
        else:
            yield from self.linear_attn.wanted(f"{name}.linear_attn")
        yield from self.mlp.wanted(f"{name}.mlp")
        yield copied(f"{name}.input_layernorm.weight", self.input_layernorm.weight)
        yield copied(f"{name}.post_attention_layernorm.weight", self.post_attention_layernorm.weight)


class Qwen3_5TextModel(nn.Module):
    """The decoder without the head."""

    def __init__(self, config: PretrainedConfig, cache_config: CacheConfig | None,
                 quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Qwen3_5DecoderLayer(config, layer, cache_config, quant_config, f"{prefix}.layers.{layer}")
            for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        rope = config.rope_parameters
        self.rotary = RotaryTable(int(config.head_dim * rope["partial_rotary_factor"]), rope["rope_theta"],
                                  rope.get("mrope_section"))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, kv_caches: list[torch.Tensor],
                attn_metadata: AttentionMetadata) -> torch.Tensor:
        """input_ids: [T]; positions: [T] or [3, T]; kv_caches: one per full-attention layer -> [T, hidden]."""
        rows = _rows(attn_metadata, input_ids)
        rotation = self.rotary(positions)
        x = self.embed_tokens(input_ids)
        pictures = get_picture_step()
        if pictures is not None:
            pictures.place(x)
        residual = torch.zeros_like(x)
        caches = iter(kv_caches)
        for layer in self.layers:
            kv_cache = next(caches) if layer.is_attention else None
            x, residual = layer(x, residual, rotation, kv_cache, attn_metadata, rows)
        return self.norm(x, residual)[0]

    def wanted(self, name: str) -> Iterable[Wanted]:
        """The checkpoint tensors of the decoder, whose name there is `name`."""
        yield vocabulary(f"{name}.embed_tokens.weight", self.embed_tokens)
        yield copied(f"{name}.norm.weight", self.norm.weight)
        for index, layer in enumerate(self.layers):
            yield from layer.wanted(f"{name}.layers.{index}")


class Qwen3_5ForCausalLM(nn.Module):
    """The dense and the mixture-of-experts model, from a text-only checkpoint or the text part of one with pictures.

    Attributes:
        visual: the vision tower; None in an architecture that takes no pictures, or without vision_config.
        mtp: the multi-token-prediction head; None where VLLM_OVERLAY_MTP does not ask for it or there is none.

    Raises:
        ValueError: settings that are not implemented, sizes that the tensor-parallel ranks cannot share, pipeline
            parallelism. The message is one line.
    """
    takes_pictures = False
    # Asks the loader for shards instead of whole tensors.
    reads_shards = True

    def __init__(self,
                 config: PretrainedConfig,
                 cache_config: CacheConfig | None = None,
                 quant_config: QuantizationConfig | None = None) -> None:
        super().__init__()
        self.config = config
        self.text_config = config.get_text_config()
        _check_supported(config, self.text_config, quant_config)
        vision = getattr(config, "vision_config", None)
        # Not quantised: a fiftieth of the weights, and published quantised checkpoints leave it alone.
        self.visual = (VisionTower(vision, self.text_config.hidden_size, "visual")
                       if self.takes_pictures and vision is not None else None)
        self.model = Qwen3_5TextModel(self.text_config, cache_config, quant_config, "model")
        self.mtp: nn.Module | None = None
        if mtp_is_asked() and getattr(self.text_config, "mtp_num_hidden_layers", 0):
            # It is made of this module's layers.
            from vllm.overlay.model.mtp import MultiTokenPredictor
            self.mtp = MultiTokenPredictor(self.text_config, cache_config, quant_config, "mtp")
        if config.tie_word_embeddings:
            self.lm_head: VocabParallelEmbedding = self.model.embed_tokens
        else:
            self.lm_head = ParallelLMHead(self.text_config.vocab_size, self.text_config.hidden_size,
                                          quant_config=quant_config, prefix=int8.HEAD)
        self.logits_processor = LogitsProcessor(self.text_config.vocab_size)
        self.sampler = Sampler()
        use_linear_operator(self)

    def get_state_spec(self) -> StateSpec:
        """What the state pool must hold per slot on this rank."""
        text, tp = self.text_config, get_tensor_model_parallel_world_size()
        keys = text.linear_num_key_heads * text.linear_key_head_dim
        values = text.linear_num_value_heads * text.linear_value_head_dim
        return StateSpec(num_layers=text.layer_types.count(LINEAR_ATTENTION),
                         conv_shape=((2 * keys + values) // tp, text.linear_conv_kernel_dim - 1),
                         conv_dtype=self.model.norm.weight.dtype,
                         recurrent_shape=(text.linear_num_value_heads // tp, text.linear_key_head_dim,
                                          text.linear_value_head_dim))

    def embed_pictures(self, pixels: Sequence[torch.Tensor], grids: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """The pictures' embeddings, [tokens, hidden] each; see VisionTower.forward.

        Raises:
            ValueError: the model takes no pictures; pixels that do not fit their grid.
        """
        if self.visual is None:
            raise ValueError(f"{type(self).__name__} takes no pictures")
        return self.visual(pixels, grids)

    def forward(self,
                input_ids: torch.Tensor,
                positions: torch.Tensor,
                kv_caches: list[torch.Tensor],
                attn_metadata: AttentionMetadata,
                intermediate_tensors: IntermediateTensors | None = None) -> torch.Tensor:
        """input_ids: [T]; positions: [T] or [3, T]; kv_caches: one per full-attention layer -> [T, hidden]."""
        return self.model(input_ids, positions, kv_caches, attn_metadata)

    def compute_logits(self, hidden_states: torch.Tensor, sampling_metadata: SamplingMetadata) -> torch.Tensor | None:
        """[T, hidden] -> [sampled tokens, vocabulary]; None on tensor-parallel ranks that do not sample."""
        return self.logits_processor(self.lm_head, hidden_states, sampling_metadata)

    def sample(self, logits: torch.Tensor, sampling_metadata: SamplingMetadata) -> SamplerOutput | None:
        """Draws the next tokens."""
        return self.sampler(logits, sampling_metadata)

    def predict_next(self, hidden_states: torch.Tensor, next_token_ids: torch.Tensor, positions: torch.Tensor,
                     kv_cache: torch.Tensor, attn_metadata: AttentionMetadata, step: int = 0) -> torch.Tensor:
        """The multi-token-prediction head: what compute_logits makes the token after the next one of.

        Args:
            hidden_states: [T, hidden] as forward returned them, or this method. next_token_ids: [T], the token after
                each. positions: [T] or [3, T], of the hidden states. kv_cache: of the head's layer `step`, which sees
                the T tokens as attn_metadata says. step: how many tokens the head has predicted before.

        Returns:
            [T, hidden].

        Raises:
            ValueError: there is no head.
        """
        if self.mtp is None:
            raise ValueError(f"no multi-token-prediction head is loaded: {self._why_no_head()}")
        return self.mtp(hidden_states, self.model.embed_tokens(next_token_ids), self.model.rotary(positions), kv_cache,
                        attn_metadata, step)

    def _why_no_head(self) -> str:
        if not getattr(self.text_config, "mtp_num_hidden_layers", 0):
            return "the configuration has no mtp_num_hidden_layers"
        if not mtp_is_asked():
            return f"the multi-token-prediction head is not asked for, {MTP_ASKED}=1 loads it"
        return f"the checkpoint has no {MTP_PREFIX}*"

    def load_weights(self, weights: Shards | Weights) -> None:
        """Loads a checkpoint in the published layout, `model.language_model.*`, or the text-only one, `model.*`.

        Raises:
            CheckpointError: a tensor that is unknown, missing, repeated, or of the wrong shape or type.
        """
        skipped = {}
        wanted = list(self.model.wanted("model"))
        if self.visual is not None:
            wanted += self.visual.wanted("model.visual")
        else:
            skipped.update(dict.fromkeys(VISION_PREFIX, NO_TOWER))
        if self.mtp is not None:
            wanted += self.mtp.wanted(MTP_PREFIX.rstrip("."))
        else:
            skipped[MTP_PREFIX] = self._why_no_head()
        if self.config.tie_word_embeddings:
            skipped["lm_head."] = "the configuration ties the head to the embedding"
        else:
            wanted.append(vocabulary("lm_head.weight", self.lm_head))
        if load_checkpoint(weights, wanted, skipped, (TEXT_PREFIX, VISION_PREFIX), [MTP_PREFIX]) and self.mtp:
            self.mtp = None
            logger.info("Skipped the multi-token-prediction head: %s", self._why_no_head())


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """Published name of the text-only mixture-of-experts model."""


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """Published name of the dense model with pictures."""
    takes_pictures = True


class Qwen3_5MoeForConditionalGeneration(Qwen3_5ForCausalLM):
    """Published name of the mixture-of-experts model with pictures."""
    takes_pictures = True


def _is_moe(text: PretrainedConfig) -> bool:
    return hasattr(text, "num_experts")


def _expert_filler(place: tuple[torch.Tensor, torch.Tensor | None], expert: int) -> Callable[[torch.Tensor], object]:
    values, scale = place
    return filler(values[expert], None if scale is None else scale[expert])


def _rows(attn_metadata: AttentionMetadata, input_ids: torch.Tensor) -> Rows:
    step = get_state_step()
    if step is not None:
        starts = step.query_start_loc
        context_lens = None
        if attn_metadata.seq_lens is not None:
            pieces = [end - start for start, end in zip(starts, starts[1:])]  # noqa: B905
            context_lens = [length - piece for length, piece in zip(attn_metadata.seq_lens, pieces, strict=True)]
        return Rows(step.pool, step.live_slots, starts, step.num_prefills, step.captures, context_lens)
    starts = [0]
    if attn_metadata.num_prefills:
        starts = attn_metadata.query_start_loc[:attn_metadata.num_prefills + 1].tolist()
    starts += range(starts[-1] + 1, input_ids.shape[0] + 1)
    slots = torch.arange(len(starts) - 1, device=input_ids.device)
    return Rows(None, slots, starts, attn_metadata.num_prefills, (), None)


def _check_supported(config: PretrainedConfig, text: PretrainedConfig, quant_config: QuantizationConfig | None) -> None:
    tp = get_tensor_model_parallel_world_size()
    split = ["linear_num_key_heads", "linear_num_value_heads", "num_attention_heads"]
    split += ["moe_intermediate_size", "shared_expert_intermediate_size"] if _is_moe(text) else ["intermediate_size"]
    uneven = [f"{name} {getattr(text, name)}" for name in split if getattr(text, name) % tp]
    if text.num_key_value_heads % tp and tp % text.num_key_value_heads:
        uneven.append(f"num_key_value_heads {text.num_key_value_heads}")
    flags = [key for key in ("rope_scaling", "rope_theta")
             if getattr(config, key, None) is not None or getattr(text, key, None) is not None]
    if get_pp_group().world_size > 1:
        raise ValueError("pipeline parallelism is not supported for this model")
    if uneven:
        raise ValueError(f"tensor parallel size {tp} does not divide {', '.join(uneven)}")
    if text.linear_num_value_heads % text.linear_num_key_heads:
        raise ValueError(f"linear_num_value_heads {text.linear_num_value_heads} is no multiple of "
                         f"linear_num_key_heads {text.linear_num_key_heads}")
    if text.hidden_act != "silu":
        raise ValueError(f"hidden_act {text.hidden_act!r} is not supported, only 'silu'")
    if not getattr(text, "attn_output_gate", True):
        raise ValueError("attn_output_gate false is not supported")
    if text.rope_parameters["rope_type"] != "default":
        raise ValueError(f"rope_type {text.rope_parameters['rope_type']!r} is not supported, only 'default'")
    if flags:
        raise ValueError(f"{flags[0]} cannot be overridden for this model: edit rope_parameters in its config.json")
    if _is_moe(text) and quant_config is not None and not isinstance(quant_config, int8.Int8WeightOnlyConfig):
        raise ValueError(f"{quant_config.get_name()} quantization is not supported for routed experts")
