"""Fills a model's parameters from a stream of named checkpoint tensors, and says exactly what does not fit.

A model states the tensors that it wants as `Wanted` entries. Each tensor is copied into its parameter as it comes by,
so that the model exists once and beside it one checkpoint tensor.
"""
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from vllm.logger import init_logger

logger = init_logger(__name__)

NAMES_SHOWN = 5


class CheckpointError(ValueError):
    """A checkpoint that does not hold what the model needs; the message is one line."""


class Wanted(NamedTuple):
    """One tensor of a checkpoint.

    name: as in the checkpoint. shape: of the whole tensor, before any split over ranks; None: `load` judges it.
    load: copies the tensor into its place. parts: other tensors that together may stand in for this one.
    """
    name: str
    shape: tuple[int, ...] | None
    load: Callable[[torch.Tensor], None]
    parts: tuple["Wanted", ...] = ()


def load_checkpoint(weights: Iterable[tuple[str, torch.Tensor]], wanted: Iterable[Wanted], skipped: dict[str, str],
                    aliases: Sequence[tuple[str, str]]) -> None:
    """Loads every tensor of `weights` into its place.

    Args:
        weights: (name, tensor) pairs.
        wanted: what the model needs, all of it.
        skipped: name prefix -> why tensors under it are left out. Each prefix met is logged as one line.
        aliases: (prefix in some checkpoints, the same in `wanted`) pairs. Messages use the checkpoint's spelling.

    Raises:
        CheckpointError: a tensor of the wrong shape (at once); tensors unknown, given twice or missing (at the end, so
            that all are counted).
    """
    whole = {want.name: want for want in wanted}
    part_of = {part.name: (want, part) for want in whole.values() for part in want.parts}
    loaded: dict[str, set[str]] = {name: set() for name in whole}
    left_out: dict[str, int] = {}
    unknown: list[str] = []
    twice: list[str] = []
    used: set[tuple[str, str]] = set()
    for given, tensor in weights:
        prefix = next((prefix for prefix in skipped if given.startswith(prefix)), None)
        if prefix is not None:
            left_out[prefix] = left_out.get(prefix, 0) + 1
            continue
        name = given
        alias = next((pair for pair in aliases if given.startswith(pair[0])), None)
        if alias is not None:
            name = alias[1] + given[len(alias[0]):]
            used.add(alias)
        if name in whole:
            want = entry = whole[name]
        elif name in part_of:
            want, entry = part_of[name]
        else:
            unknown.append(given)
            continue
        seen = loaded[want.name]
        if want.name in seen or name in seen or (entry is want and seen):
            twice.append(given)
            continue
        if entry.shape is not None and tuple(tensor.shape) != entry.shape:
            raise CheckpointError(f"checkpoint tensor {given} has shape {tuple(tensor.shape)}, "
                                  f"the model needs {entry.shape}")
        entry.load(tensor)
        seen.add(name)
    for prefix, count in left_out.items():
        logger.info("Skipped checkpoint tensors under %s* (%d): %s", prefix, count, skipped[prefix])
    missing = [_respelt(name, aliases, used) for want in whole.values() for name in _missing(want, loaded[want.name])]
    kinds = (("missing", missing), ("unknown", unknown), ("repeated", twice))
    problems = [_listed(kind, names) for kind, names in kinds if names]
    if problems:
        raise CheckpointError(f"the checkpoint does not fit the model: {'; '.join(problems)}")


def _missing(want: Wanted, loaded: set[str]) -> list[str]:
    if want.name in loaded:
        return []
    if not loaded:
        return [want.name]
    return [part.name for part in want.parts if part.name not in loaded]


def _respelt(name: str, aliases: Sequence[tuple[str, str]], used: set[tuple[str, str]]) -> str:
    fitting = [alias for alias in aliases if name.startswith(alias[1])]
    if not fitting:
        return name
    alias = max(fitting, key=lambda pair: len(pair[1]))
    return alias[0] + name[len(alias[1]):] if alias in used else name


def _listed(kind: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{len(names)} {kind} tensor{'s' if len(names) > 1 else ''}: {', '.join(names[:NAMES_SHOWN])}{more}"


def copied(name: str, param: torch.nn.Parameter) -> Wanted:
    """A tensor that every rank holds whole."""
    return Wanted(name, tuple(param.shape), param.data.copy_)


def linear(name: str, layer: torch.nn.Module, output_size: int, input_size: int, *shard: object) -> list[Wanted]:
    """The tensors of one checkpoint matrix inside stock parallel linear `layer`.

    Args:
        name: of the matrix, without ".weight". output_size, input_size: of the whole matrix.
        shard: stock's shard id where the layer merges several matrices.
    """

    def loader(param: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
        return lambda tensor: param.weight_loader(param, tensor, *shard)

    return [
        Wanted(f"{name}.{key}", _linear_shape(layer, key, output_size, input_size), loader(param))
        for key, param in layer.named_parameters(recurse=False)
    ]


def joined_linear(name: str, layer: torch.nn.Module, output_sizes: Sequence[int], input_size: int) -> list[Wanted]:
    """The tensors of one checkpoint matrix whose rows are the first `len(output_sizes)` shards of merged `layer`."""

    def loader(param: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
        dim = getattr(param, "output_dim", None)

        def load(tensor: torch.Tensor) -> None:
            for shard, size in enumerate(output_sizes):
                piece = tensor
                if dim is not None:
                    # Packed or blockwise quantised tensors have fewer rows, in proportion.
                    rows = tensor.shape[dim]
                    start = sum(output_sizes[:shard]) * rows // sum(output_sizes)
                    piece = tensor.narrow(dim, start, size * rows // sum(output_sizes))
                param.weight_loader(param, piece, shard)

        return load

    return [
        Wanted(f"{name}.{key}", _linear_shape(layer, key, sum(output_sizes), input_size), loader(param))
        for key, param in layer.named_parameters(recurse=False)
    ]


def _linear_shape(layer: torch.nn.Module, key: str, output_size: int, input_size: int) -> tuple[int, ...] | None:
    if type(layer.quant_method).__name__ != "UnquantizedLinearMethod":
        return None
    return (output_size, input_size) if key == "weight" else (output_size, )
