"""Fills a model's parameters from the tensors of a checkpoint, and says exactly what does not fit.

A model states the tensors that it wants, and which pieces of them this rank needs, as `Wanted` entries. Each piece is
copied into its parameter as it comes by, so that the model exists once and beside it one piece.
"""
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.overlay.kernels.int8_weights import quantise_into
from vllm.overlay.model.shards import CheckpointError, Cut, Shards, StoredTensor

logger = init_logger(__name__)

NAMES_SHOWN = 5
WHOLE: Cut = ()
# Parameter beside an int8 `weight`: what each of its rows is multiplied by.
SCALE = "int8_scale"
LAID_OUT_AS_HERE = ("UnquantizedLinearMethod", "LinearOperatorMethod", "Int8LinearMethod")

Weights = Iterable[tuple[str, torch.Tensor]]


class Wanted(NamedTuple):
    """One tensor of a checkpoint.

    name: as in the checkpoint. shape: of the whole tensor, before any split over ranks; None: `load` judges it.
    load: puts the pieces into their place; called once, with one tensor per cut. parts: other tensors that together may
    stand in for this one. cuts: the pieces that this rank needs.
    """
    name: str
    shape: tuple[int, ...] | None
    load: Callable[..., object]
    parts: tuple["Wanted", ...] = ()
    cuts: tuple[Cut, ...] = (WHOLE, )

    def take(self, tensor: torch.Tensor | StoredTensor) -> None:
        """Reads the pieces that this rank needs out of the whole tensor, and loads them."""
        self.load(*[_piece(tensor, cut) for cut in self.cuts])


def load_checkpoint(weights: Shards | Weights, wanted: Iterable[Wanted], skipped: dict[str, str],
                    aliases: Sequence[tuple[str, str]], optional: Sequence[str] = ()) -> set[str]:
    """Loads every tensor of `weights` into its place.

    Args:
        weights: shards, which are checked as a whole before the first is read; or (name, tensor) pairs.
        wanted: what the model needs, all of it.
        skipped: name prefix -> why tensors under it are left out. Each prefix met is logged as one line.
        aliases: (prefix in some checkpoints, the same in `wanted`) pairs. Messages use the checkpoint's spelling.
        optional: prefixes of `wanted` names under which all tensors may be missing together.

    Returns:
        the optional prefixes under which the checkpoint has nothing.

    Raises:
        CheckpointError: a tensor of the wrong shape or dtype (at once); tensors unknown, given twice or missing (when
            all are counted).
    """
    matching = _Matching(wanted, skipped, aliases)
    if not isinstance(weights, Shards):
        for name, tensor in weights:
            want = matching.take(name, tuple(tensor.shape), tensor.dtype)
            if want is not None:
                want.take(tensor)
        return matching.finish(optional)
    entries = {name: want for name, header in weights.headers.items()
               if (want := matching.take(name, header.shape, header.dtype)) is not None}
    absent = matching.finish(optional)
    started = time.monotonic()
    first = get_tensor_model_parallel_rank() == 0
    for name, stored in weights.read(entries.__contains__, show=first):
        entries[name].take(stored)
    if first:
        took = time.monotonic() - started
        logger.info("Loaded weights in %.1f s: %.3f of the checkpoint's %.3f GB read (%.2f GB/s); beside the weights "
                    "at most one shard was in memory, %.3f GB", took, weights.bytes_read / 1e9,
                    weights.bytes_total / 1e9, weights.bytes_read / 1e9 / max(took, 1e-3), weights.largest / 1e9)
    return absent


def _piece(tensor: torch.Tensor | StoredTensor, cut: Cut) -> torch.Tensor:
    return tensor if isinstance(tensor, torch.Tensor) and not cut else tensor[cut]


class _Matching:
    """Which tensor of a checkpoint goes to which entry, and what is left on either side."""

    def __init__(self, wanted: Iterable[Wanted], skipped: dict[str, str], aliases: Sequence[tuple[str, str]]) -> None:
        self.whole = {want.name: want for want in wanted}
        self.part_of = {part.name: (want, part) for want in self.whole.values() for part in want.parts}
        self.seen: dict[str, set[str]] = {name: set() for name in self.whole}
        self.skipped, self.aliases = skipped, aliases
        self.left_out: dict[str, int] = {}
        self.unknown: list[str] = []
        self.twice: list[str] = []
        self.used: set[tuple[str, str]] = set()

    def take(self, given: str, shape: tuple[int, ...], dtype: torch.dtype) -> Wanted | None:
        """The entry for the tensor; None where it is not to be loaded."""
        prefix = next((prefix for prefix in self.skipped if given.startswith(prefix)), None)
        if prefix is not None:
            self.left_out[prefix] = self.left_out.get(prefix, 0) + 1
            return None
        name = given
        alias = next((pair for pair in self.aliases if given.startswith(pair[0])), None)
        if alias is not None:
            name = alias[1] + given[len(alias[0]):]
            self.used.add(alias)
        if name in self.whole:
            want = entry = self.whole[name]
        elif name in self.part_of:
            want, entry = self.part_of[name]
        else:
            self.unknown.append(given)
            return None
        seen = self.seen[want.name]
        if want.name in seen or name in seen or (entry is want and seen):
            self.twice.append(given)
            return None
        if entry.shape is not None:
            if shape != entry.shape:
                raise CheckpointError(f"checkpoint tensor {given} has shape {shape}, the model needs {entry.shape}")
            if not dtype.is_floating_point or dtype.itemsize < 2:
                raise CheckpointError(f"checkpoint tensor {given} is {str(dtype)[6:]}, the model needs a float of "
                                      f"16 bits or more; a quantised checkpoint must say so in its config.json")
        seen.add(name)
        return entry

    def finish(self, optional: Sequence[str]) -> set[str]:
        """Logs what was left out; returns the optional prefixes that were not met."""
        for prefix, count in self.left_out.items():
            logger.info("Skipped checkpoint tensors under %s* (%d): %s", prefix, count, self.skipped[prefix])
        absent = {prefix for prefix in optional
                  if not any(seen for name, seen in self.seen.items() if name.startswith(prefix))}
        missing = [self._respelt(name) for want in self.whole.values() if not want.name.startswith(tuple(absent))
                   for name in self._missing(want)]
        kinds = (("missing", missing), ("unknown", self.unknown), ("repeated", self.twice))
        problems = [_listed(kind, names) for kind, names in kinds if names]
        if problems:
            raise CheckpointError(f"the checkpoint does not fit the model: {'; '.join(problems)}")
        return absent

    def _missing(self, want: Wanted) -> list[str]:
        seen = self.seen[want.name]
        if want.name in seen:
            return []
        if not seen:
            return [want.name]
        return [part.name for part in want.parts if part.name not in seen]

    def _respelt(self, name: str) -> str:
        fitting = [alias for alias in self.aliases if name.startswith(alias[1])]
        if not fitting:
            return name
        alias = max(fitting, key=lambda pair: len(pair[1]))
        return alias[0] + name[len(alias[1]):] if alias in self.used else name


def _listed(kind: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{len(names)} {kind} tensor{'s' if len(names) > 1 else ''}: {', '.join(names[:NAMES_SHOWN])}{more}"


def copied(name: str, param: torch.nn.Parameter) -> Wanted:
    """A tensor that every rank holds whole."""
    return Wanted(name, tuple(param.shape), param.data.copy_)


def split(name: str, shape: tuple[int, ...], dim: int, load: Callable[[torch.Tensor], object]) -> Wanted:
    """A tensor of which every rank holds its equal share along `dim`."""
    return Wanted(name, shape, load, cuts=(rank_cut(dim, shape[dim]), ))


def rank_cut(dim: int, size: int, first: int = 0) -> Cut:
    """This rank's share of `size` elements from `first` on along `dim`."""
    share = size // get_tensor_model_parallel_world_size()
    first += get_tensor_model_parallel_rank() * share
    return (slice(None), ) * dim + (slice(first, first + share), )


def filler(values: torch.Tensor, scale: torch.Tensor | None) -> Callable[[torch.Tensor], object]:
    """What puts a tensor of values' shape into it: as it is, or as int8 with `scale` for each of its rows."""
    if scale is None:
        return values.copy_
    return lambda tensor: quantise_into(tensor, values, scale)


def vocabulary(name: str, layer: VocabParallelEmbedding) -> Wanted:
    """The rows of an embedding or head that belong to this rank; rows that pad the vocabulary are zero."""
    start, end = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index

    def load(tensor: torch.Tensor) -> None:
        both = layer.weight.data, getattr(layer, SCALE, None)
        filler(*(None if one is None else one[:end - start] for one in both))(tensor)
        for one in both:
            if one is not None:
                one[end - start:].zero_()

    return Wanted(name, (layer.org_vocab_size, layer.embedding_dim), load, cuts=((slice(start, end), ), ))


class _Share(NamedTuple):
    """Rows of one checkpoint matrix that this rank holds: `rows` from `first` on, of `size`."""
    first: int
    rows: int
    size: int


def _shares(layer: torch.nn.Module) -> dict[object, _Share]:
    """By stock's shard id, in the order in which they lie in the layer's parameter."""
    ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
    if isinstance(layer, QKVParallelLinear):
        # Where there are fewer KV heads than ranks, several ranks hold the same one.
        queries, keys = layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size
        key = _Share(rank // layer.num_kv_head_replicas * keys, keys, layer.total_num_kv_heads * layer.head_size)
        return {"q": _Share(rank * queries, queries, layer.total_num_heads * layer.head_size), "k": key, "v": key}
    if isinstance(layer, ColumnParallelLinear):
        sizes = layer.output_sizes if isinstance(layer, MergedColumnParallelLinear) else [layer.output_size]
        return {shard: _Share(rank * (size // ranks), size // ranks, size) for shard, size in enumerate(sizes)}
    return {0: _Share(0, layer.output_size, layer.output_size)}


def linear(name: str, layer: torch.nn.Module, output_size: int, input_size: int, *shard: object) -> list[Wanted]:
    """The tensors of one checkpoint matrix inside stock parallel linear `layer`.

    Args:
        name: of the matrix, without ".weight". output_size, input_size: of the whole matrix.
        shard: stock's shard id where the layer merges several matrices; several ids, in the layer's order, of a matrix
            that joins them; none: of a matrix that joins all.
    """
    shares = _shares(layer)
    if not _is_ours(layer):
        return _left_to_stock(name, layer, [(one, shares[one].size) for one in shard])
    found, cuts, rows = [], [], []
    start = {one: sum(share.rows for share in list(shares.values())[:place]) for place, one in enumerate(shares)}
    first = 0
    for one in shard or tuple(shares):
        share = shares[one]
        cuts.append(slice(first + share.first, first + share.first + share.rows))
        rows.append(slice(start[one], start[one] + share.rows))
        first += share.size
    columns: Cut = WHOLE
    if isinstance(layer, RowParallelLinear):
        columns = rank_cut(1, input_size)[1:]
    for key, param in layer.named_parameters(recurse=False):
        if key == "weight":
            scale = getattr(layer, SCALE, None)
            places = [filler(param.data[at], scale if scale is None else scale.data[at]) for at in rows]
            found.append(Wanted(f"{name}.{key}", (output_size, input_size), _each(places),
                                cuts=tuple((cut, *columns) for cut in cuts)))
        elif key != SCALE:
            places = [filler(param.data[at], None) for at in rows]
            found.append(Wanted(f"{name}.{key}", (output_size, ), _each(places), cuts=tuple((cut, ) for cut in cuts)))
    return found


def _each(places: Sequence[Callable[[torch.Tensor], object]]) -> Callable[..., None]:

    def load(*pieces: torch.Tensor) -> None:
        for place, piece in zip(places, pieces, strict=True):
            place(piece)

    return load


def _is_ours(layer: torch.nn.Module) -> bool:
    """Whether the layer's parameters lie as here described; otherwise only its own weight loaders know how."""
    return type(layer.quant_method).__name__ in LAID_OUT_AS_HERE


def _left_to_stock(name: str, layer: torch.nn.Module, shards: Sequence[tuple[object, int]]) -> list[Wanted]:
    """Tensors of a quantised checkpoint, given whole to stock's loaders.

    Args:
        shards: stock's shard ids and the sizes of their matrices.
    """

    def loader(param: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
        dim = getattr(param, "output_dim", None)

        def load(tensor: torch.Tensor) -> None:
            if len(shards) < 2:
                param.weight_loader(param, tensor, *[shard for shard, _ in shards])
                return
            first, total = 0, sum(size for _, size in shards)
            for shard, size in shards:
                piece = tensor
                if dim is not None:
                    # Packed or blockwise quantised tensors have fewer rows, in proportion.
                    rows = tensor.shape[dim]
                    piece = tensor.narrow(dim, first * rows // total, size * rows // total)
                param.weight_loader(param, piece, shard)
                first += size

        return load

    return [Wanted(f"{name}.{key}", None, loader(param)) for key, param in layer.named_parameters(recurse=False)]
