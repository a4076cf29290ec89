"""Choice of an operator's back end: once per process, logged as one line, forced by an environment variable.

Every operator folder owns one `Backends`. A back end is a module that defines the operator's functions by their public
names; it is imported only when chosen. A module that depends on compiled code or on a device defines
`unavailable() -> Optional[str]`: the reason why it cannot run here, or None; and, if it was never meant for every
platform, `for_this_platform() -> bool`: where it is false, nobody misses it.

A server asks `unavailable` too, before the engine's process exists, and must not hold a device. So the import of a back
end and `unavailable` may look for files and modules, read the environment, and ask
`vllm.utils.cuda_device_count_stateless()` (asking `torch.cuda` keeps every process forked later from the device); they
may not open a library that opens the device, make a tensor on it, or ask for its properties. What only the device can
tell is told by the worker, as an error: it must choose what the server announced.
"""
import importlib
import os
import pkgutil
from collections.abc import Sequence
from types import ModuleType

from vllm.logger import init_logger
from vllm.overlay.runtime.announced import agree

logger = init_logger(__name__)


class Backends:
    """The back ends of one operator, best first.

    Args:
        op: name of the operator's folder.
        names: back end -> module name inside the folder, in order of preference. The order is the default choice.

    The variable `VLLM_OVERLAY_KERNELS_<OP>` (upper case) names the one to use; empty is as unset.
    """

    def __init__(self, op: str, modules: Sequence[tuple[str, str]]) -> None:
        self.op = op
        self.variable = f"VLLM_OVERLAY_KERNELS_{op.upper()}"
        self._modules: dict[str, str] = {name: f"{__package__}.{op}.{module}" for name, module in modules}
        self._chosen: tuple[str, ModuleType] | None = None

    @property
    def names(self) -> list[str]:
        """All back ends, best first, available or not."""
        return list(self._modules)

    def load(self, name: str) -> ModuleType:
        """Returns the module of back end `name`.

        Raises:
            ValueError: no such back end; the message names the choices.
            RuntimeError: it exists but cannot run on this machine; the message says why.
        """
        if name not in self._modules:
            raise ValueError(f"{self.op}: no back end {name!r}; the choices are {', '.join(self.names)}")
        module = importlib.import_module(self._modules[name])
        reason = _unavailable(module)
        if reason is not None:
            raise RuntimeError(f"{self.op}: back end {name!r} cannot run here: {reason}; "
                               f"the choices are {', '.join(self.names)}")
        return module

    def chosen(self) -> ModuleType:
        """Returns the module in use; the first call decides and logs.

        Raises:
            ValueError, RuntimeError: the back end asked for by the environment is unknown or cannot run (see `load`),
            or the server announced another one than can run here.
        """
        return self._decided()[1]

    def chosen_name(self) -> str:
        """Returns the name of the back end in use. Raises as `chosen`."""
        return self._decided()[0]

    def choices(self) -> dict[str, str]:
        """Returns what is announced: the operator -> its back end. Raises as `chosen`."""
        return {self.op: self.chosen_name()}

    def _decided(self) -> tuple[str, ModuleType]:
        if self._chosen is None:
            name, module = self._choose()
            agree(self.op, name, f"{self.variable}={name}")
            self._chosen = name, module
        return self._chosen

    def _choose(self) -> tuple[str, ModuleType]:
        asked = os.environ.get(self.variable, "")
        if asked:
            try:
                module = self.load(asked)
            except (ValueError, RuntimeError) as error:
                raise type(error)(f"{self.variable}={asked}: {error}") from None
            logger.info("%s: back end %s (asked for by %s)", self.op, asked, self.variable)
            return asked, module
        for name, path in self._modules.items():
            module = importlib.import_module(path)
            reason = _unavailable(module)
            if reason is None:
                logger.info("%s: back end %s (of %s)", self.op, name, ", ".join(self.names))
                return name, module
            if not getattr(module, "for_this_platform", lambda: True)():
                continue
            logger.warning("%s: back end %s cannot run here: %s", self.op, name, reason)
        raise RuntimeError(f"{self.op}: none of the back ends {', '.join(self.names)} can run here")


def operators() -> dict[str, Backends]:
    """The back ends of every operator, by name of the operator."""
    package = importlib.import_module(__package__)
    folders = sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg)
    return {op: importlib.import_module(f"{__package__}.{op}").backends for op in folders}


def choose_all() -> dict[str, str]:
    """Decides for every operator. Returns operator -> name of its back end, by name of the operator; of one that
    chooses by phase (phased.py), "<op> <phase>" -> name.

    Raises:
        ValueError, RuntimeError: an operator cannot have the back end that the environment asks for (see `Backends`).
    """
    return {what: name for backends in operators().values() for what, name in backends.choices().items()}


def _unavailable(module: ModuleType) -> str | None:
    check = getattr(module, "unavailable", None)
    return check() if check is not None else None
