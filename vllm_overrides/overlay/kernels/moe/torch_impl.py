"""Router and experts in vectorised PyTorch: grouped by expert for prompts, joined into batched products for decode."""

import torch
import torch.nn.functional as F

from vllm.overlay.kernels.phased import FEW_TOKENS

# Copies of expert weights that one batched product of the decode path may hold at a time.
_GATHER_BYTES = 256 << 20


def route(router_logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's `route`."""
    weights, ids = torch.softmax(router_logits, dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids


def pack(w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's `pack`: rows are best."""
    return w13, w2


def experts(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor,
            ids: torch.Tensor) -> torch.Tensor:
    """See the package's `experts`."""
    if x.shape[0] <= FEW_TOKENS and x.device.type != "cpu":
        return experts_gathered(x, w13, w2, weights, ids)
    return experts_grouped(x, w13, w2, weights, ids)


def experts_grouped(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor,
                    ids: torch.Tensor) -> torch.Tensor:
    """One pair of products per expert in use, over the tokens that chose it. Reads the counts on the host."""
    top_k = ids.shape[1]
    order = torch.argsort(ids.flatten(), stable=True)
    token = torch.div(order, top_k, rounding_mode="floor")
    weight = weights.flatten()[order].unsqueeze(1)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    start = 0
    for expert, count in enumerate(torch.bincount(ids.flatten(), minlength=w13.shape[0]).tolist()):
        if count:
            chosen = token[start:start + count]
            gate, up = F.linear(x[chosen], w13[expert]).chunk(2, dim=-1)
            down = F.linear(_swiglu(gate, up), w2[expert])
            total.index_add_(0, chosen, down.float().mul_(weight[start:start + count]))
            start += count
    return total.to(x.dtype)


def experts_gathered(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor,
                     ids: torch.Tensor) -> torch.Tensor:
    """All chosen experts of a few tokens as batched products over copies of their weights, without a host sync."""
    tokens, top_k = ids.shape
    pair_bytes = (w13[0].numel() + w2[0].numel()) * w13.element_size()
    step = max(1, _GATHER_BYTES // (pair_bytes * top_k))
    parts = []
    for start in range(0, tokens, step):
        chosen = ids[start:start + step]
        rows = chosen.shape[0]
        flat = chosen.flatten()
        inputs = x[start:start + step].unsqueeze(1).expand(rows, top_k, -1).reshape(rows * top_k, -1, 1)
        gate, up = torch.bmm(w13[flat], inputs).squeeze(2).chunk(2, dim=-1)
        down = torch.bmm(w2[flat], _swiglu(gate, up).unsqueeze(2)).view(rows, top_k, -1)
        parts.append((down.float() * weights[start:start + step].unsqueeze(2)).sum(1).to(x.dtype))
    return torch.cat(parts) if parts else torch.empty_like(x)


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)
