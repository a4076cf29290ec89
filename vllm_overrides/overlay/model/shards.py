"""A safetensors checkpoint as a folder of shards: checked by its headers, then read piece by piece, shard by shard.

Only the pieces that are asked for are read, out of a shard that is mapped into memory. So a tensor-parallel rank reads
its own part, and what is in memory beside the weights is at most one shard, in pages that the system may drop.
Format: https://huggingface.co/docs/safetensors (8 bytes length, JSON header, data).
"""
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from tqdm.auto import tqdm

from vllm.logger import init_logger

logger = init_logger(__name__)

INDEX = "model.safetensors.index.json"
LARGEST_HEADER = 100_000_000
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}

Cut = tuple[slice, ...]


class CheckpointError(ValueError):
    """A checkpoint that does not hold what the model needs; the message is one line."""


class Header(NamedTuple):
    """What a shard says of one tensor. start: of its bytes in the shard's data."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int


class StoredTensor:
    """One tensor of an open shard; indexing reads, a cut is a slice for each of the first dimensions."""

    def __init__(self, name: str, header: Header, handle: Any, count: Callable[[int], None]) -> None:
        self.shape, self.dtype = header.shape, header.dtype
        self._name, self._handle, self._count = name, handle, count

    def __getitem__(self, cut: Cut) -> torch.Tensor:
        tensor = self._handle.get_slice(self._name)[cut] if cut else self._handle.get_tensor(self._name)
        self._count(tensor.numel() * tensor.element_size())
        return tensor


class Shards:
    """The checkpoint in `folder`: the shards that its index names, or without an index all *.safetensors files.

    Attributes:
        headers: name -> header, of every tensor. bytes_total: of the shards. largest: bytes of the largest shard.
        bytes_read: of the pieces read so far.

    Raises:
        CheckpointError: no shards; a shard that is missing, cut short or damaged; an index that is damaged or names a
            file or a tensor that is not there; a tensor that two shards have. Found by reading headers only.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = _read_index(folder / INDEX) if (folder / INDEX).exists() else None
        files = sorted(path.name for path in folder.glob("*.safetensors")) if index is None else \
            sorted(set(index.values()))
        if not files:
            raise CheckpointError(f"{folder} has no *.safetensors files")
        self._shards: dict[str, dict[str, Header]] = {}
        self.headers: dict[str, Header] = {}
        holder: dict[str, str] = {}
        for file in files:
            self._shards[file] = read_header(folder / file)
            for name, header in self._shards[file].items():
                if name in holder:
                    raise CheckpointError(f"checkpoint tensor {name} is both in {holder[name]} and in {file}")
                holder[name], self.headers[name] = file, header
        for name, file in (index or {}).items():
            if name not in self._shards[file]:
                raise CheckpointError(f"{INDEX} says that {name} is in {file}, which does not hold it")
        sizes = [(folder / file).stat().st_size for file in files]
        self.bytes_total, self.largest, self.bytes_read = sum(sizes), max(sizes), 0

    def read(self, wanted: Callable[[str], bool], show: bool) -> Iterator[tuple[str, StoredTensor]]:
        """Yields the tensors that are wanted, shard by shard, in the order in which they lie there. Each can be read
        until the next one is asked for. Shards without any are not opened.

        Args:
            show: report progress: a bar on a terminal, otherwise a line per shard.
        """
        shards = {file: names for file, header in self._shards.items()
                  if (names := [name for name in sorted(header, key=lambda name: header[name].start) if wanted(name)])}
        terminal = show and sys.stderr.isatty()
        # By itself tqdm makes a lock between processes, too: a semaphore, which a process that is killed leaves behind.
        tqdm.set_lock(threading.RLock())
        started = time.monotonic()
        for number, (file, names) in enumerate(tqdm(shards.items(), "Loading weights", unit=" shards",
                                                    disable=not terminal), 1):
            try:
                with safe_open(self.folder / file, framework="pt") as handle:
                    for name in names:
                        yield name, StoredTensor(name, self._shards[file][name], handle, self._add)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.folder / file} cannot be read: {error}") from None
            if show and not terminal and len(shards) > 1:
                logger.info("Weights: shard %d of %d, %.2f GB read, %.1f s", number, len(shards),
                            self.bytes_read / 1e9, time.monotonic() - started)

    def _add(self, count: int) -> None:
        self.bytes_read += count


def read_header(path: Path) -> dict[str, Header]:
    """Returns name -> header of the tensors in one shard, without reading them.

    Raises:
        CheckpointError: no such file, not a safetensors file, or shorter or longer than its header says.
    """
    try:
        size = os.stat(path).st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(LARGEST_HEADER, max(0, size - 8)):
                raise CheckpointError(f"{path} is no safetensors file: {size} bytes, a header of {length}")
            found = json.loads(file.read(length))
        found.pop("__metadata__", None)
        headers = {name: _header(path, name, **entry) for name, entry in found.items()}
    except OSError as error:
        raise CheckpointError(f"shard {path} cannot be opened: {error.strerror}; fetch it again") from None
    except (ValueError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} has a damaged header ({str(error).splitlines()[0]}); fetch it again") from None
    needed = 8 + length + max((entry["data_offsets"][1] for entry in found.values()), default=0)
    if size != needed:
        raise CheckpointError(f"{path} has {size} bytes and its header says {needed}; fetch it again")
    return headers


def _header(path: Path, name: str, dtype: str, shape: list[int], data_offsets: list[int]) -> Header:
    start, end = data_offsets
    if dtype not in DTYPES:
        raise CheckpointError(f"checkpoint tensor {name} in {path} is {dtype}, which is none of {', '.join(DTYPES)}")
    if math.prod(shape) * DTYPES[dtype].itemsize != end - start:
        raise ValueError(f"{name} of {dtype} {shape} in {end - start} bytes")
    return Header(tuple(shape), DTYPES[dtype], start)


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = {name: Path(file).name for name, file in index.items()}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index of a checkpoint: {error!r}") from None
    missing = sorted(file for file in set(names.values()) if not (path.parent / file).is_file())
    if missing:
        raise CheckpointError(f"{path} names {len(set(names.values()))} shards, of which {len(missing)} are missing: "
                              f"{', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}; fetch them")
    return names
