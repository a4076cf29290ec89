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
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    wanted = captures_by_row(captures, query_start_loc)
    single: list[int] = []
    for row in range(num_prefills):
        start, end = query_start_loc[row], query_start_loc[row + 1]
        if end - start == 1:
            single.append(row)
        elif end > start:
            slot = live_slots[row:row + 1]
            state = _joined(recurrent.index_select(0, slot)[0], q.shape[1])
            piece = _Piece(context_lens[row] % CHUNK, end - start)
            state = piece.run(q[start:end], k[start:end], v[start:end], g[start:end], beta[start:end], state,
                              out[start:end], [(offset, recurrent[target]) for offset, target in wanted[row]])
            recurrent.index_copy_(0, slot, _by_head(state, v.shape[1]).unsqueeze(0))
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
    """One token for each of n rows: q, k [n, HK, K], v [n, HV, V]. Returns [n, HV, V].

    Both reads of the state, for the prediction and for the output, are one product with the state before the update:
    S_new^T q = exp(g) S^T q + (k . q) written.
    """
    q, k = _normalised(q).mul_(q.shape[2]**-0.5), _normalised(k)
    repeat = v.shape[1] // q.shape[1]
    state = recurrent.index_select(0, slots)
    both = torch.stack((k, q), dim=2).repeat_interleave(repeat, dim=1)
    decay = g.exp().unsqueeze(-1)
    read = torch.matmul(both, state).mul_(decay.unsqueeze(-1))
    written = (v.float() - read[:, :, 0]).mul_(beta.unsqueeze(-1))
    overlap = (k * q).sum(-1).repeat_interleave(repeat, dim=1)
    out = torch.addcmul(read[:, :, 1], overlap.unsqueeze(-1), written)
    state.mul_(decay.unsqueeze(-1)).addcmul_(both[:, :, 0].unsqueeze(-1), written.unsqueeze(-2))
    recurrent.index_copy_(0, slots, state)
    return out


def _joined(state: torch.Tensor, key_heads: int) -> torch.Tensor:
    """[HV, K, V] -> [HK, K, R V]: the value heads of a key head side by side, so that one product reads them all."""
    return state.view(key_heads, -1, *state.shape[1:]).transpose(1, 2).flatten(2)


def _by_head(state: torch.Tensor, heads: int) -> torch.Tensor:
    """[HK, K, R V] -> [HV, K, V]."""
    key_heads, key, _ = state.shape
    return state.view(key_heads, key, heads // key_heads, -1).transpose(1, 2).reshape(heads, key, -1)


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
        """Fills `out` and the captures' tensors; returns the joined state after the piece."""
        for first in range(0, self.chunks, _GROUP):
            count = min(_GROUP, self.chunks - first)
            begin = first * self.size - self.lead
            end = begin + count * self.size
            low, high = max(begin, 0), min(end, self.length)
            before, after = low - begin, end - high
            inside = [(offset - begin, target) for offset, target in captures if low < offset <= high]
            qs, ks, vs, gs, betas = (_padded(x[low:high], before, after) for x in (q, k, v, g, beta))
            if before or after:
                mixed = torch.empty(vs.shape, dtype=torch.float32, device=v.device)
                state = _chunks(qs, ks, vs, gs, betas, state, self.size, mixed, inside)
                out[low:high] = mixed[before:before + high - low]
            else:
                state = _chunks(qs, ks, vs, gs, betas, state, self.size, out[low:high], inside)
        return state


def _padded(x: torch.Tensor, before: int, after: int) -> torch.Tensor:
    return F.pad(x, (0, 0) * (x.dim() - 1) + (before, after)) if before or after else x


def _chunks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
            state: torch.Tensor, size: int, out: torch.Tensor,
            captures: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """n whole chunks of one row: q, k [n size, HK, K]; v and out [n size, HV, V], out float32; the state joined.

    `captures`: (tokens into these chunks, [HV, K, V] to fill), ascending. Returns the joined state after the chunks.
    """
    chunks, key_heads, heads, value = q.shape[0] // size, q.shape[1], v.shape[1], v.shape[2]
    repeat = heads // key_heads
    readers = torch.empty(chunks, key_heads, 2, size, q.shape[2], dtype=torch.float32, device=q.device)
    for at, x, scale in ((0, k, 1.0), (1, q, q.shape[2]**-0.5)):
        x = x.view(chunks, size, key_heads, -1).transpose(1, 2).float()
        torch.mul(x, torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) * scale, out=readers[:, :, at])
    k, readers = readers[:, :, 0], readers.flatten(2, 3)
    v, out = (x.view(chunks, size, key_heads, repeat, value).permute(0, 2, 3, 1, 4) for x in (v, out))
    g, beta = (x.view(chunks, size, heads).transpose(1, 2).contiguous() for x in (g, beta))

    decay = _pairwise_decay(g)
    since_start = g.cumsum(-1).exp_().view(chunks, key_heads, repeat, size, 1)
    products = torch.matmul(readers, k.transpose(2, 3)).unsqueeze(2)
    decay = decay.view(chunks, key_heads, repeat, size, size)
    system = (decay * products[..., :size, :]).mul_(beta.view(chunks, key_heads, repeat, size, 1))
    solved = _unit_lower_inverse(system.view(-1, size, size)).view(chunks, heads, size, size)
    solved.mul_(beta.unsqueeze(2))
    attention = (decay * products[..., size:, :]).view(chunks, heads, size, size)

    written = torch.empty(key_heads, repeat, size, value, dtype=torch.float32, device=q.device)
    todo = list(captures)
    for c in range(chunks):
        read = torch.bmm(readers[c], state).view(key_heads, 2 * size, repeat, value).transpose(1, 2)
        torch.addcmul(v[c].float(), read[:, :, :size], since_start[c], value=-1, out=written)
        values = torch.bmm(solved[c], written.view(heads, size, value))
        torch.mul(read[:, :, size:], since_start[c], out=written)
        mixed = written.view(heads, size, value).baddbmm_(attention[c], values)
        out[c].copy_(mixed.view(key_heads, repeat, size, value))
        values = values.view(key_heads, repeat, size, value)
        while todo and todo[0][0] < (c + 1) * size:
            offset, target = todo.pop(0)
            inner = _advanced(state, k[c], values, decay[c], since_start[c], offset - c * size)
            target.copy_(_by_head(inner, heads))
        state = _advanced(state, k[c], values, decay[c], since_start[c], size)
        while todo and todo[0][0] == (c + 1) * size:
            todo.pop(0)[1].copy_(_by_head(state, heads))
    return state


def _advanced(state: torch.Tensor, k: torch.Tensor, values: torch.Tensor, decay: torch.Tensor,
              since_start: torch.Tensor, count: int) -> torch.Tensor:
    """The joined state after the first `count` tokens of a chunk, from the one before it.

    k [HK, C, K]; values [HK, R, C, V], what each token writes; decay [HK, R, C, C]; since_start [HK, R, C, 1].
    """
    key_heads, repeat, _, value = values.shape
    weighted = torch.empty(key_heads, count, repeat, value, dtype=torch.float32, device=values.device)
    torch.mul(values[:, :, :count], decay[:, :, count - 1, :count, None], out=weighted.transpose(1, 2))
    carried = state.view(key_heads, -1, repeat, value) * since_start[:, None, :, count - 1]
    return carried.flatten(2).baddbmm_(k[:, :count].transpose(1, 2), weighted.flatten(2))


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
