"""Softmax over scores that come in tiles, so that no whole row of scores has to exist."""
import torch


class OnlineSoftmax:
    """softmax(scores) values over scores that come in tiles. A tile may have fewer rows than the one before it."""

    def __init__(self) -> None:
        self._peak: torch.Tensor | None = None

    def add(self, scores: torch.Tensor, values: torch.Tensor) -> None:
        """scores [n, lines, positions] (overwritten; none all -inf in the first tile), values [n, positions, D]."""
        peak = scores.amax(-1, keepdim=True)
        if self._peak is None:
            weights = scores.sub_(peak).exp_()
            self._peak, self._total, self._mixed = peak, weights.sum(-1, keepdim=True), torch.matmul(weights, values)
            return
        rows = scores.shape[0]
        before = self._peak[:rows]
        peak = torch.maximum(before, peak)
        weights = scores.sub_(peak).exp_()
        shrink = (before - peak).exp_()
        self._total[:rows].mul_(shrink).add_(weights.sum(-1, keepdim=True))
        self._mixed[:rows].mul_(shrink).add_(torch.matmul(weights, values))
        before.copy_(peak)

    def result(self) -> torch.Tensor:
        """[n, lines, D] with the first tile's n."""
        return self._mixed / self._total
