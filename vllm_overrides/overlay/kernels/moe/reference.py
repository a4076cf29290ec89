"""Router and experts, token by token in float32: the truth that back ends are compared with."""

import torch


def route(router_logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's `route`. Of equal probabilities the lower id comes first."""
    logits = router_logits.float()
    exp = torch.exp(logits - logits.max(1, keepdim=True).values)
    probabilities = exp / exp.sum(1, keepdim=True)
    order = torch.sort(probabilities, dim=1, descending=True, stable=True).indices
    ids = order[:, :top_k].contiguous()
    weights = probabilities.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    return weights, ids


def pack(w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's `pack`: rows are best."""
    return w13, w2


def experts(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor,
            ids: torch.Tensor) -> torch.Tensor:
    """See the package's `experts`."""
    inner = w2.shape[2]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for t, chosen in enumerate(ids.tolist()):
        for j, e in enumerate(chosen):
            both = w13[e].float() @ x[t].float()
            gate, up = both[:inner], both[inner:]
            hidden = gate / (1 + torch.exp(-gate)) * up
            out[t] += weights[t, j] * (w2[e].float() @ hidden)
    return out.to(x.dtype)
