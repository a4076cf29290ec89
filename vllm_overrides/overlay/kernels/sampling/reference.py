"""The filters row by row over a full sort: the truth that back ends are compared with."""
import torch


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """See the package's `greedy`."""
    rows = [int((row == row.max()).nonzero()[0]) for row in logits]
    return torch.tensor(rows, dtype=torch.int64, device=logits.device)


def apply_top_k_top_p(logits: torch.Tensor, p: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """See the package's `apply_top_k_top_p`."""
    out = torch.full_like(logits, -float("inf"))
    for row in range(logits.shape[0]):
        ascending, ids = torch.sort(logits[row], stable=True)
        smallest_kept = ascending[len(ascending) - int(k[row])]
        ascending = torch.where(ascending < smallest_kept, -float("inf"), ascending)
        mass = torch.softmax(ascending, 0).cumsum(0)
        dropped = mass <= 1 - p[row]
        dropped[-1] = False
        out[row, ids[~dropped]] = ascending[~dropped]
    return out


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """See the package's `apply_min_p`."""
    out = logits.clone()
    for row in range(logits.shape[0]):
        probabilities = torch.softmax(logits[row], 0)
        out[row, probabilities < min_p[row] * probabilities.max()] = -float("inf")
    return out
