"""vLLM's attention back end over `vllm.overlay.kernels.paged_attention`: prompts, pieces of prompts and decode rows in
one batch.

It runs on every device and is the default on all. On the CPU it is the only one; on a card VLLM_ATTENTION_BACKEND names
stock's.
"""
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Optional

import torch

from vllm.attention.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadata, AttentionType
from vllm.attention.backends.utils import CommonAttentionState, CommonMetadataBuilder
from vllm.overlay.kernels.paged_attention import paged_attention, write_kv

_OTHERS = "on a card VLLM_ATTENTION_BACKEND=FLASH_ATTN or XFORMERS names stock's"


class PagedTorchBackend(AttentionBackend):
    """The four classes of the back end and the layout of its cache: [2 (keys, values), blocks, block size, KV heads,
    head size]."""

    @staticmethod
    def get_name() -> str:
        return "torch-paged"

    @staticmethod
    def get_impl_cls() -> type["PagedTorchImpl"]:
        return PagedTorchImpl

    @staticmethod
    def get_metadata_cls() -> type["PagedTorchMetadata"]:
        return PagedTorchMetadata

    @staticmethod
    def get_builder_cls() -> type["PagedTorchMetadataBuilder"]:
        return PagedTorchMetadataBuilder

    @staticmethod
    def get_state_cls() -> type["PagedTorchState"]:
        return PagedTorchState

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def swap_blocks(src_kv_cache: torch.Tensor, dst_kv_cache: torch.Tensor, src_to_dst: torch.Tensor) -> None:
        """src_to_dst: [n, 2] block numbers."""
        if src_to_dst.numel():
            source, target = src_to_dst.long().unbind(1)
            dst_kv_cache[:, target.to(dst_kv_cache.device)] = src_kv_cache[:, source.to(src_kv_cache.device)].to(
                dst_kv_cache.device)

    @staticmethod
    def copy_blocks(kv_caches: list[torch.Tensor], src_to_dists: torch.Tensor) -> None:
        """src_to_dists: [n, 2] block numbers."""
        source, target = src_to_dists.long().unbind(1)
        for cache in kv_caches:
            cache[:, target] = cache[:, source]


class PagedTorchState(CommonAttentionState):
    """Stock's state, without graphs: row starts and lengths are host integers, which a captured graph would keep for
    ever."""

    def graph_capture(self, max_batch_size: int) -> Any:
        """Raises ValueError: whoever starts without --enforce-eager on a card learns it before the first request."""
        raise ValueError("the torch-paged attention back end cannot be captured in CUDA graphs: give --enforce-eager")


@dataclass
class PagedTorchMetadata(AttentionMetadata):
    """Rows of one step, prefill rows first. Lists live on the host, so that no operator waits for the device.

    seq_lens: per row, context and piece together. query_starts: row i has the tokens [query_starts[i], query_starts[i +
    1]).
    block_tables: int32 [rows, max blocks]. The other fields are what stock's metadata builder and models ask for.
    """
    seq_lens: list[int] | None = None
    seq_lens_tensor: torch.Tensor | None = None
    max_query_len: int | None = None
    max_prefill_seq_len: int = 0
    max_decode_seq_len: int = 0
    query_start_loc: torch.Tensor | None = None
    seq_start_loc: torch.Tensor | None = None
    context_lens_tensor: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    use_cuda_graph: bool = False
    query_starts: list[int] | None = None

    @property
    def prefill_metadata(self) -> Optional["PagedTorchMetadata"]:
        return self if self.num_prefills else None

    @property
    def decode_metadata(self) -> Optional["PagedTorchMetadata"]:
        return self if self.num_decode_tokens else None


class PagedTorchMetadataBuilder(CommonMetadataBuilder[PagedTorchMetadata]):
    """Stock's builder; keeps the row starts on the host and every row's whole block table."""

    _metadata_cls = PagedTorchMetadata

    def _add_seq_group(self, inter_data: Any, chunked_prefill_enabled: bool) -> None:
        # Without chunked prefill stock leaves out the tables of prompts, whose keys it takes from the batch.
        super()._add_seq_group(inter_data, True)

    def build(self, seq_lens: list[int], query_lens: list[int], cuda_graph_pad_size: int,
              batch_size: int) -> PagedTorchMetadata:
        metadata = super().build(seq_lens, query_lens, cuda_graph_pad_size, batch_size)
        metadata.query_starts = [0, *accumulate(query_lens)]
        return metadata


class PagedTorchImpl(AttentionImpl[PagedTorchMetadata]):
    """One attention layer: any head size, grouped query heads, causal.

    Raises:
        ValueError: a feature that the operator does not have (ALiBi, sliding window, soft cap, block sparsity, a
        quantised cache).
    """

    def __init__(self,
                 num_heads: int,
                 head_size: int,
                 scale: float,
                 num_kv_heads: int | None = None,
                 alibi_slopes: list[float] | None = None,
                 sliding_window: int | None = None,
                 kv_cache_dtype: str = "auto",
                 blocksparse_params: dict[str, Any] | None = None,
                 logits_soft_cap: float | None = None) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        if num_heads % self.num_kv_heads:
            raise ValueError(f"{num_heads} query heads do not divide among {self.num_kv_heads} KV heads")
        refused = [name for name, value in (("ALiBi", alibi_slopes), ("a sliding window", sliding_window),
                                            ("block sparsity", blocksparse_params),
                                            ("a logits soft cap", logits_soft_cap)) if value is not None]
        if kv_cache_dtype != "auto":
            refused.append(f"KV cache dtype {kv_cache_dtype}")
        if refused:
            raise ValueError(f"the torch-paged attention back end does not support {', '.join(refused)}; {_OTHERS}")

    def forward(self,
                query: torch.Tensor,
                key: torch.Tensor,
                value: torch.Tensor,
                kv_cache: torch.Tensor,
                attn_metadata: PagedTorchMetadata,
                k_scale: float = 1.0,
                v_scale: float = 1.0,
                attn_type: AttentionType = AttentionType.DECODER) -> torch.Tensor:
        """query: [T, heads * head size]; key, value: [T, KV heads * head size] -> [T, heads * head size].

        kv_cache: see `PagedTorchBackend`; empty while memory is profiled: rows then see their own piece only.
        """
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"the torch-paged attention back end is for decoders, not for {attn_type.name}; "
                                      f"{_OTHERS}")
        meta = attn_metadata
        assert meta.query_starts is not None and meta.seq_lens is not None and meta.block_tables is not None
        query = query.reshape(-1, self.num_heads, self.head_size)
        key = key.reshape(-1, self.num_kv_heads, self.head_size)
        value = value.reshape(-1, self.num_kv_heads, self.head_size)
        if kv_cache.numel():
            key_cache, value_cache = kv_cache.unbind(0)
            write_kv(key, value, key_cache, value_cache, meta.slot_mapping)
            tables, seq_lens = meta.block_tables, meta.seq_lens
        else:
            key_cache, value_cache = key.unsqueeze(1).contiguous(), value.unsqueeze(1).contiguous()
            tables, seq_lens = _own_tokens(meta.query_starts, query.device)
        out = paged_attention(query.contiguous(), key_cache, value_cache, tables, meta.query_starts, seq_lens,
                              self.scale)
        return out.reshape(-1, self.num_heads * self.head_size)


def _own_tokens(query_starts: list[int], device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """Tables over the step's own tokens, seen as a cache with blocks of one token."""
    lengths = [end - start for start, end in pairwise(query_starts)]
    first = torch.tensor(query_starts[:-1], device=device)
    offsets = torch.arange(max(lengths), device=device)
    tables = first[:, None] + offsets
    return tables.clamp_(max=query_starts[-1] - 1), lengths
