"""How many checkpoints of recurrent state a rank keeps, where nobody has said it (docs/memory.md)."""
from typing import NamedTuple

GIB = 1 << 30
# Of what would be left for KV: checkpoints and KV serve the same requests, and a hit needs both. Beside a card the host
# keeps most of them, so a smaller share leaves more KV and more hits (worklogs/LEDGER.md, worklogs/cache_sim.py).
_SHARE_OF_A_CARD, _SHARE_OF_A_CPU = 0.1, 0.2
# A CPU's memory is not all the server's.
_MOST_ON_A_CPU = 2 * GIB
# On the host beside a card.
_MOST_ON_THE_HOST = 8 * GIB
# All ranks together leave half of main memory, and one alone seven eighths, to whoever else wants it: to read weights,
# to begin with.
_HOST_SHARE, _HOST_SHARE_OF_ALL = 1 / 8, 1 / 2
# A checkpoint is of use only as long as the KV before it is there, and one in so many tokens loses no more than that.
# Small models have room for more than anybody asks again for.
_TOKENS, _MOST = 64, 2048


class Room(NamedTuple):
    """What checkpoints may take on one rank.

    slot: bytes of one. left: bytes of the device beside all but KV. kv: bytes of KV that must remain, and tokens:
    of KV that there will be at most. sequences: that run at once, each of which has a checkpoint in hand. host: bytes
    of main memory that all `ranks` can take together; None: as many as are wanted. on_cpu: the device is the CPU.
    """
    slot: int
    left: int
    kv: int
    tokens: int
    sequences: int
    host: int | None
    ranks: int
    on_cpu: bool

    @property
    def useful(self) -> int:
        """Checkpoints on device and host together, of which more would hardly be hit."""
        return min(self.tokens // _TOKENS, _MOST) + self.sequences

    def on_device(self) -> int:
        """Checkpoints on the device."""
        size = min(int((_SHARE_OF_A_CPU if self.on_cpu else _SHARE_OF_A_CARD) * self.left), self.left - self.kv)
        if self.on_cpu:
            size = min(size, _MOST_ON_A_CPU)
        return max(0, min(size // self.slot, self.useful))

    def on_host(self, on_device: int) -> int:
        """Checkpoints on the host beside so many on the device; none beside a CPU, whose memory it would be."""
        if self.on_cpu or not on_device:
            return 0
        size = _MOST_ON_THE_HOST
        if self.host is not None:
            size = min(size, int(self.host * _HOST_SHARE), int(self.host * _HOST_SHARE_OF_ALL) // self.ranks)
        return max(0, min(size // self.slot, self.useful - on_device))
