"""The worker of every device: stock's, and the memory of recurrent states."""
from typing import Any

from vllm.overlay.hybrid.plan import allocate_pool
from vllm.overlay.kernels.backend import choose_all
from vllm.worker import worker_stock as _stock


class Worker(_stock.Worker):
    """Stock's worker; after the weights it allocates the state pool, so that the KV budget is what remains."""

    def load_model(self) -> None:
        """Stock's. Raises RuntimeError, before it reads weights, where this rank cannot use the announced back ends."""
        choose_all()
        super().load_model()
        self.model_runner.state_pool = allocate_pool(self.model_runner.model, self.cache_config, self.device,
                                                     self._free_for_state())

    def first_nonfinite_state(self, slot: int) -> int | None:
        """See `StatePool.first_nonfinite`; of this rank's part of the states."""
        return self.model_runner.state_pool.first_nonfinite(slot)

    def _free_for_state(self) -> int | None:
        """Bytes that the state pool may take; None: the device will say."""
        return None


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
