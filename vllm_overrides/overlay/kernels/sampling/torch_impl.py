"""The filters in vectorised PyTorch: candidates for rows of small top-k, a full sort for the rows that need one."""
import torch

# Largest k for which candidates are selected instead of sorting the row.
SMALL_K = 256
# Logits of a row that `greedy` looks at one by one; the vocabularies of the models are multiples of it.
_BLOCK = 128
# Candidates beyond k, so that logits equal to the k-th (common in bfloat16) are among them.
_SLACK = 64


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """See the package's `greedy`."""
    rows, vocabulary = logits.shape
    if logits.is_cuda or vocabulary % _BLOCK or not logits.is_contiguous():
        return logits.argmax(dim=-1)
    # On a CPU PyTorch's argmax looks at one number after the other; its amax is vectorised.
    blocks = logits.view(rows, vocabulary // _BLOCK, _BLOCK)
    block = blocks.amax(dim=-1).argmax(dim=-1)
    inside = blocks[torch.arange(rows, device=logits.device), block].argmax(dim=-1)
    return block * _BLOCK + inside


def apply_top_k_top_p(logits: torch.Tensor, p: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """See the package's `apply_top_k_top_p`. Reads k, and whether ties outgrow the candidates, on the host."""
    rows, vocab = logits.shape
    limits = k.tolist()
    small = [row for row in range(rows) if limits[row] <= SMALL_K and limits[row] + _SLACK < vocab]
    if not small:
        return _by_sorting(logits, p, k)
    count = max(limits[row] for row in small) + _SLACK
    if len(small) == rows:
        out, complete = _by_candidates(logits, p, k, count)
        if complete.all():
            return out
        rest = (~complete).nonzero().flatten()
    else:
        chosen = torch.tensor(small, device=logits.device)
        part, complete = _by_candidates(logits[chosen], p[chosen], k[chosen], count)
        out = torch.empty_like(logits)
        out[chosen] = part
        done = torch.zeros(rows, dtype=torch.bool, device=logits.device)
        done[chosen] = complete
        rest = (~done).nonzero().flatten()
    out[rest] = _by_sorting(logits[rest], p[rest], k[rest])
    return out


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """See the package's `apply_min_p`."""
    probabilities = torch.softmax(logits, dim=-1)
    floor = min_p.unsqueeze(1) * probabilities.amax(dim=-1, keepdim=True)
    return logits.masked_fill(probabilities < floor, -float("inf"))


def _by_candidates(logits: torch.Tensor, p: torch.Tensor, k: torch.Tensor,
                   count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Filters by the `count` largest of each row. Returns the result and which rows it is complete for."""
    values, ids = logits.topk(count, dim=-1)
    smallest_kept = values.gather(1, k.long().unsqueeze(1) - 1)
    # Grammars leave few tokens: then the k-th is -inf, and what is missing from the candidates is -inf too.
    complete = (values[:, -1] < smallest_kept.squeeze(1)) | smallest_kept.squeeze(1).isneginf()
    # Among equal logits the order is by token id, which topk does not promise.
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, stable=True)
    ids = ids.gather(1, order)
    kept = _drop_tail(values.masked_fill(values < smallest_kept, -float("inf")), p)
    return torch.full_like(logits, -float("inf")).scatter_(1, ids, kept), complete


def _by_sorting(logits: torch.Tensor, p: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    values, ids = logits.sort(dim=-1, stable=True)
    smallest_kept = values.gather(1, (logits.shape[1] - k.long()).unsqueeze(1))
    kept = _drop_tail(values.masked_fill_(values < smallest_kept, -float("inf")), p)
    return torch.empty_like(logits).scatter_(1, ids, kept)


def _drop_tail(ascending: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    dropped = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - p.unsqueeze(1)
    dropped[:, -1] = False
    return ascending.masked_fill_(dropped, -float("inf"))
