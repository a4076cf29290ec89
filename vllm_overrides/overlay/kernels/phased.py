"""An operator whose back end is chosen twice: for calls of many tokens, a prefill's, and of few, a decode's.

MOE_NATIVE switches the first and MOE_DECODE_NATIVE the second, for every operator of routed experts: 1 is the compiled
one, which then must run, 0 is PyTorch's, and unset or empty is the operator's own choice (backend.py).
"""
import os
from collections.abc import Sequence
from types import ModuleType

from vllm.logger import init_logger
from vllm.overlay.kernels.backend import Backends
from vllm.overlay.runtime.announced import agree
from vllm.overlay.runtime.switches import switch

logger = init_logger(__name__)

# So many tokens are few. PyTorch's joined products on a card are for these, too: that path has a copy of an expert's
# weights for every token.
FEW_TOKENS = 16
PREFILL, DECODE = "prefill", "decode"
SWITCHES = {PREFILL: "MOE_NATIVE", DECODE: "MOE_DECODE_NATIVE"}


def phase_of(tokens: int) -> str:
    """Returns what a call of so many tokens counts as."""
    return DECODE if tokens <= FEW_TOKENS else PREFILL


class PhasedBackends(Backends):
    """The back ends of an operator of routed experts, best first; see `Backends`.

    Args:
        entirely: whether all its functions go by phase; else some use `chosen`, and it is announced beside the phases.
    """

    def __init__(self, op: str, modules: Sequence[tuple[str, str]], entirely: bool) -> None:
        super().__init__(op, modules)
        self._entirely = entirely
        self._phases: tuple[ModuleType, ModuleType] | None = None
        self._names: dict[str, str] = {}

    def chosen_for(self, tokens: int) -> ModuleType:
        """Returns the module in use for a call of so many tokens; the first call decides and logs.

        Raises:
            ValueError: a switch is neither 0 nor 1, or contradicts the operator's own variable; and see `chosen`.
            RuntimeError: what a switch asks for cannot run here; and see `chosen`.
        """
        if self._phases is None:
            self._decide_phases()
            assert self._phases is not None
        return self._phases[tokens <= FEW_TOKENS]

    def only(self) -> ModuleType | None:
        """Returns the module in use for every call; None where phases, or the other functions, have different ones.
        Raises as `chosen_for`."""
        few, many = self.chosen_for(0), self.chosen_for(FEW_TOKENS + 1)
        return few if few is many and (self._entirely or few is self.chosen()) else None

    def choices(self) -> dict[str, str]:
        """Returns what is announced: "<op> <phase>" -> back end, after that of the operator where it is used. Raises as
        `chosen_for`."""
        self.chosen_for(0)
        return {**({} if self._entirely else super().choices()), **self._names}

    def _decide_phases(self) -> None:
        found = {phase: self._choose_phase(variable) for phase, variable in SWITCHES.items()}
        for phase, (name, _, how) in found.items():
            agree(f"{self.op} {phase}", name, how)
        logger.info("%s: back end %s for more than %d tokens (%s), %s for up to %d (%s)", self.op, found[PREFILL][0],
                    FEW_TOKENS, SWITCHES[PREFILL], found[DECODE][0], FEW_TOKENS, SWITCHES[DECODE])
        self._names = {f"{self.op} {phase}": name for phase, (name, _, _) in found.items()}
        self._phases = found[PREFILL][1], found[DECODE][1]

    def _choose_phase(self, variable: str) -> tuple[str, ModuleType, str]:
        """(name, module, what to set to have it everywhere)"""
        asked = switch(variable)
        if asked is None:
            name = self.chosen_name()
            return name, self.chosen(), f"{self.variable}={name}"
        name, how = ("native" if asked else "torch"), f"{variable}={int(asked)}"
        whole = os.environ.get(self.variable, "")
        if whole and whole != name:
            raise ValueError(f"{how} contradicts {self.variable}={whole}: it asks for back end {name}")
        try:
            return name, self.load(name), how
        except RuntimeError as error:
            raise RuntimeError(f"{how}: {error}") from None
