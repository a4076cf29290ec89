"""`python -m vllm.overlay.model.int8_error CHECKPOINT`: what `--quantization int8_weight_only` does to every layer.

For each group of matrices of a layer: bytes before and after; the error of the weights; and the error of their products
with normal inputs in bfloat16 against the same product with the checkpoint's own weights in bfloat16. Errors are root
mean squares relative to the root mean square of what they are errors of. Needs no device and no engine, reads one
matrix at a time. Exit code 2 for a checkpoint that cannot be read.
"""
import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from vllm.overlay.kernels.int8_weights import int8_linear, quantise
from vllm.overlay.model.int8 import HEAD, covers
from vllm.overlay.model.shards import CheckpointError, Shards

LARGE = re.compile(r"^(?P<group>.*layers\.\d+\.(?:self_attn|linear_attn|mlp\.experts|mlp\.shared_expert|mlp))"
                   r"\.(?:\d+\.)?(?:[qkvo]_proj|in_proj_qkv|in_proj_z|out_proj|gate_proj|up_proj|down_proj|gate_up_proj)"
                   r"(?:\.weight)?$")
HEAD_WEIGHT = f"{HEAD}.weight"
TOKENS = 16


class Error(NamedTuple):
    """Sums over a group: elements, squares of weights, of their errors, of products, of their errors."""
    elements: float = 0
    rows: float = 0
    weights: float = 0.0
    weight_errors: float = 0.0
    products: float = 0.0
    product_errors: float = 0.0

    def plus(self, other: "Error") -> "Error":
        return Error(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def of_weights(self) -> float:
        return (self.weight_errors / self.weights)**0.5 if self.weights else 0.0

    @property
    def of_products(self) -> float:
        return (self.product_errors / self.products)**0.5 if self.products else 0.0


def quantised(name: str) -> bool:
    """Whether the matrix of this name in a checkpoint is put into int8."""
    return (name == HEAD_WEIGHT or LARGE.match(name) is not None) and covers(name)


def measure(weight: torch.Tensor, generator: torch.Generator) -> Error:
    """weight: [N, K] or a stack of such, any float dtype."""
    if weight.dim() == 3:
        total = Error()
        for one in weight:
            total = total.plus(measure(one, generator))
        return total
    values, scale = quantise(weight)
    exact = weight.float()
    x = torch.randn(TOKENS, weight.shape[1], generator=generator).to(torch.bfloat16)
    right = F.linear(x, weight.to(torch.bfloat16)).float()
    found = int8_linear(x, values, scale).float()
    return Error(weight.numel(), weight.shape[0], _squares(exact), _squares(values * scale[:, None] - exact),
                 _squares(right), _squares(found - right))


def by_group(shards: Shards) -> Iterator[tuple[str, Error]]:
    """Yields (group of matrices, its error), in the order of the layers."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Error] = {}
    for name, stored in shards.read(quantised, show=False):
        match = LARGE.match(name)
        group = HEAD if match is None else match["group"]
        found[group] = found.get(group, Error()).plus(measure(stored[()], generator))
    yield from sorted(found.items(), key=lambda item: [int(part) if part.isdigit() else part
                                                       for part in re.split(r"(\d+)", item[0])])


def _squares(values: torch.Tensor) -> float:
    return float(values.square().sum(dtype=torch.float64))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m vllm.overlay.model.int8_error", description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="folder of safetensors files in bfloat16, float16 or float32")
    folder = parser.parse_args(arguments).checkpoint
    total = Error()
    print(f"{'matrices':60} {'bf16 MB':>9} {'int8 MB':>9} {'weights':>9} {'products':>9}")
    try:
        for group, error in by_group(Shards(folder)):
            print(_line(group, error))
            total = total.plus(error)
    except CheckpointError as problem:
        print(problem, file=sys.stderr)
        return 2
    print(_line("all", total))
    return 0


def _line(group: str, error: Error) -> str:
    return (f"{group:60} {2 * error.elements / 1e6:9.2f} {(error.elements + 4 * error.rows) / 1e6:9.2f} "
            f"{error.of_weights:9.3%} {error.of_products:9.3%}")


if __name__ == "__main__":
    sys.exit(main())
