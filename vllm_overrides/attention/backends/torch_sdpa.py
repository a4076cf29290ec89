"""Stock's CPU back end has no chunked context and no metadata builder for the GPU runner; ours takes its name."""
from typing import Any

from vllm.attention.backends import torch_sdpa_stock as _stock
from vllm.overlay.attention.paged_backend import (
    PagedTorchBackend as TorchSDPABackend,
)
from vllm.overlay.attention.paged_backend import (
    PagedTorchImpl as TorchSDPABackendImpl,
)
from vllm.overlay.attention.paged_backend import (
    PagedTorchMetadata as TorchSDPAMetadata,
)

__all__ = ["TorchSDPABackend", "TorchSDPABackendImpl", "TorchSDPAMetadata"]


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
