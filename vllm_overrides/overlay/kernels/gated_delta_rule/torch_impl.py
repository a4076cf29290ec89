"""The gated delta rule in vectorised PyTorch: prompts as products over chunks, single tokens in one batched step.

README.md derives the chunked form. Two choices matter for accuracy. The decay between two positions is the exponential
of a sum over the positions between them, never of a difference of two running sums: with a decay of exp(-80) at one
token and exp(-0.001) at the next, that difference has lost the second. And the triangular system is solved by
substitution: products of its powers cancel where keys repeat.
"""
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from vllm.overlay.kernels.gated_delta_rule import CHUNK
from vllm.overlay.kernels.rows import Capture, captures_by_row

# Chunks whose inner products are computed together: bounds memory for a piece of any length.
_GROUP = 16
_BLOCK = 16


def gate(a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor,
         dt_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's `gate`."""
    return -A_log.float().exp() * F.softplus(a.float() + dt_bias.float()), torch.sigmoid(b.float())


def gated_delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
                     recurrent: torch.Tensor, live_slots: torch.Tensor, query_start_loc: Sequence[int],
                     num_prefills: int, captures: Sequence[Capture], context_lens: Sequence[int]) -> torch.Tensor:
    """See the package's `gated_delta_rule`."""
    q, k, v = _normalised(q).mul_(q.shape[2]**-0.5), _normalised(k), v.float()
    out = torch.empty_like(v)
    wanted = captures_by_row(captures, query_start_loc)
    single: list[int] = []
    for row in range(num_prefills):
        start, end = query_start_loc[row], query_start_loc[row + 1]
        if end - start == 1:
            single.append(row)
        elif end > start:
            slot = live_slots[row:row + 1]
            piece = _Piece(context_lens[row] % CHUNK, end - start)
            state = recurrent.index_select(0, slot)[0]
            state = piece.run(q[start:end], k[start:end], v[start:end], g[start:end], beta[start:end], state,
                              out[start:end], [(offset, recurrent[target]) for offset, target in wanted[row]])
            recurrent.index_copy_(0, slot, state.unsqueeze(0))
    if not single:
        if num_prefills < live_slots.shape[0]:
            start = query_start_loc[num_prefills]
            out[start:] = _step(q[start:], k[start:], v[start:], g[start:], beta[start:], recurrent,
                                live_slots[num_prefills:])
    else:
        single.extend(range(num_prefills, live_slots.shape[0]))
        rows = torch.tensor(single, device=q.device)
        tokens = torch.tensor([query_start_loc[row] for row in single], device=q.device)
        out[tokens] = _step(q[tokens], k[tokens], v[tokens], g[tokens], beta[tokens], recurrent, live_slots[rows])
    for row, targets in enumerate(wanted):
        if query_start_loc[row + 1] - query_start_loc[row] == 1:
            for _, target in targets:
                recurrent[target] = recurrent.index_select(0, live_slots[row:row + 1])[0]
    return out


def _normalised(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
          recurrent: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """One token for each of n rows: q, k [n, HK, K] normalised, v [n, HV, V]. Returns [n, HV, V].

    Both reads of the state, for the prediction and for the output, are one product with the state before the update:
    S_new^T q = exp(g) S^T q + (k . q) written.
    """
    repeat = v.shape[1] // q.shape[1]
    state = recurrent.index_select(0, slots)
    both = torch.stack((k, q), dim=2).repeat_interleave(repeat, dim=1)
    decay = g.exp().unsqueeze(-1)
    read = torch.matmul(both, state) * decay.unsqueeze(-1)
    written = (v - read[:, :, 0]) * beta.unsqueeze(-1)
    overlap = (k * q).sum(-1).repeat_interleave(repeat, dim=1)
    out = torch.addcmul(read[:, :, 1], overlap.unsqueeze(-1), written)
    state.mul_(decay.unsqueeze(-1)).addcmul_(both[:, :, 0].unsqueeze(-1), written.unsqueeze(-2))
    recurrent.index_copy_(0, slots, state)
    return out


class _Piece:
    """One row's piece cut into chunks. `lead` is the position of its first token inside its chunk.

    A piece inside one chunk takes the smallest size that holds it; otherwise empty places before the first token and
    after the last complete the chunks (k = beta = g = 0 there leaves the state alone).
    """

    def __init__(self, lead: int, length: int) -> None:
        if lead + length <= CHUNK:
            lead = 0
            size = _BLOCK
            while size < length:
                size *= 2
        else:
            size = CHUNK
        self.lead, self.length, self.size = lead, length, size
        self.chunks = -(-(lead + length) // size)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
            state: torch.Tensor, out: torch.Tensor, captures: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """Fills `out` and the captures' tensors; returns the state [HV, K, V] after the piece."""
        for first in range(0, self.chunks, _GROUP):
            count = min(_GROUP, self.chunks - first)
            begin = first * self.size - self.lead
            end = begin + count * self.size
            low, high = max(begin, 0), min(end, self.length)
            before, after = low - begin, end - high
            inside = [(offset - begin, target) for offset, target in captures if low < offset <= high]
            qs, ks, vs, gs, betas = (_padded(x[low:high], before, after) for x in (q, k, v, g, beta))
            mixed, state = _chunks(qs, ks, vs, gs, betas, state, self.size, inside)
            out[low:high] = mixed[before:before + high - low]
        return state


def _padded(x: torch.Tensor, before: int, after: int) -> torch.Tensor:
    return F.pad(x, (0, 0) * (x.dim() - 1) + (before, after)) if before or after else x


def _chunks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
            state: torch.Tensor, size: int,
            captures: list[tuple[int, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """n whole chunks of one row: q, k [n size, HK, K]; v [n size, HV, V]; state [HV, K, V].

    Returns the output [n size, HV, V] and the state after it. `captures`: (tokens into these chunks, tensor to fill).
    """
    chunks, key_heads, heads = q.shape[0] // size, q.shape[1], v.shape[1]
    repeat = heads // key_heads
    q, k, v = (x.view(chunks, size, *x.shape[1:]).transpose(1, 2).contiguous() for x in (q, k, v))
    g, beta = (x.view(chunks, size, heads).transpose(1, 2).contiguous() for x in (g, beta))
    decay = _pairwise_decay(g)
    since_start = g.cumsum(-1).exp()
    per_key_head = (chunks, key_heads, repeat, size, size)

    keys_on_keys = torch.matmul(k, k.transpose(2, 3)).unsqueeze(2)
    system = decay.view(per_key_head) * keys_on_keys * beta.view(chunks, key_heads, repeat, size, 1)
    solved = _unit_lower_inverse(system.view(chunks, heads, size, size)).mul_(beta.unsqueeze(2))
    fresh = torch.matmul(solved, v)
    solved.mul_(since_start.unsqueeze(2))
    stale = torch.matmul(solved.view(chunks, key_heads, repeat * size, size), k)
    readers = torch.cat((stale.view(chunks, heads, size, -1), q.repeat_interleave(repeat, dim=1)), dim=2)
    attention = (decay.view(per_key_head) * torch.matmul(q, k.transpose(2, 3)).unsqueeze(2)).view(
        chunks, heads, size, size)
    k = k.repeat_interleave(repeat, dim=1)
    out = torch.empty_like(v)
    todo = list(captures)
    for c in range(chunks):
        read = torch.bmm(readers[c], state)
        values = fresh[c] - read[:, :size]
        torch.baddbmm(read[:, size:] * since_start[c].unsqueeze(2), attention[c], values, out=out[c])
        while todo and todo[0][0] < (c + 1) * size:
            row = todo[0][0] - c * size
            todo.pop(0)[1].copy_(_advance(state, k[c], values, decay[c], since_start[c], row))
        state = _advance(state, k[c], values, decay[c], since_start[c], size)
        while todo and todo[0][0] == (c + 1) * size:
            todo.pop(0)[1].copy_(state)
    return out.transpose(1, 2).reshape(chunks * size, heads, -1), state


def _advance(state: torch.Tensor, k: torch.Tensor, values: torch.Tensor, decay: torch.Tensor,
             since_start: torch.Tensor, count: int) -> torch.Tensor:
    """The state after the first `count` tokens of a chunk, from the one before it and the chunk's written values."""
    weighted = values[:, :count] * decay[:, count - 1, :count].unsqueeze(2)
    carried = state * since_start[:, count - 1, None, None]
    return carried.baddbmm_(k[:, :count].transpose(1, 2), weighted)


def _pairwise_decay(g: torch.Tensor) -> torch.Tensor:
    """[..., C] log-decays -> [..., C, C]: entry (i, j) is exp(g_{j+1} + ... + g_i) for i >= j and 0 above."""
    size = g.shape[-1]
    below = torch.ones(size, size, dtype=torch.bool, device=g.device).tril(-1)
    sums = g.unsqueeze(-1).expand(*g.shape, size).masked_fill(~below, 0).cumsum(-2)
    return sums.masked_fill_(below.t(), -float("inf")).exp_()


def _unit_lower_inverse(a: torch.Tensor) -> torch.Tensor:
    """The inverse of I + the part of a [..., C, C] strictly below its diagonal; C is 16, 32 or 64.

    Rows of the 16 x 16 blocks on the diagonal by substitution, then pairs of blocks by
    [[X, 0], [A, Y]]^-1 = [[X^-1, 0], [-Y^-1 A X^-1, Y^-1]].
    """
    shape, size = a.shape, a.shape[-1]
    a = a.reshape(-1, size, size)
    inverse = torch.zeros_like(a)
    blocks = size // _BLOCK
    diagonal = torch.stack([a[:, i * _BLOCK:(i + 1) * _BLOCK, i * _BLOCK:(i + 1) * _BLOCK] for i in range(blocks)], 1)
    solved = torch.eye(_BLOCK, dtype=a.dtype, device=a.device).expand_as(diagonal).contiguous()
    for row in range(1, _BLOCK):
        solved[:, :, row, :row] = -torch.matmul(diagonal[:, :, row, None, :row], solved[:, :, :row, :row]).squeeze(2)
    for i in range(blocks):
        inverse[:, i * _BLOCK:(i + 1) * _BLOCK, i * _BLOCK:(i + 1) * _BLOCK] = solved[:, i]
    width = _BLOCK
    while width < size:
        for at in range(0, size, 2 * width):
            upper, lower = slice(at, at + width), slice(at + width, at + 2 * width)
            inverse[:, lower, upper] = -torch.bmm(torch.bmm(inverse[:, lower, lower], a[:, lower, upper]),
                                                  inverse[:, upper, upper])
        width *= 2
    return inverse.view(shape)
