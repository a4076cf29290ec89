"""Replaces one name inside a stock module or class, loudly.

An extension subclasses what it changes, but functions inside stock look their helpers up in stock's own module and
never see the extension. Where overriding a method does not reach such a helper, the name itself is replaced here.
Traps:

- Only callers that look the name up at call time see the new value. A module that ran ``from stock import name``
  earlier keeps the old one, and so does every class that already derives from a rebound class, and every default
  argument.
- Rebind in the module whose functions use the name (usually ``x_stock``), not in the module that defines it.
- A class whose methods call ``super(Name, self)`` must not be rebound to a subclass of itself: ``Name`` is then the
  subclass, and the call recurses for ever. This is refused.
- Stock that rebinds the name itself (a ``global`` statement) undoes the rebinding without notice.
"""

from __future__ import annotations

import dis
import itertools
from types import FunctionType, ModuleType

_NO_STEP = ("PUSH_NULL", "CACHE")
# (name of the owner, name) -> (owner, new value); the start-up check asks that each is still in force.
_rebound: dict[tuple[str, str], tuple[ModuleType | type, object]] = {}


def rebind(owner: ModuleType | type, name: str, new: object) -> None:
    """Makes ``name`` of owner (a module, or a class for one method of its own) mean new.

    Raises AttributeError when owner itself has no such name, so that stock which moved on is noticed; RuntimeError
    when the name was rebound before, so that two overlays cannot take it from each other, or when new would make
    ``super(Name, self)`` recurse.
    """
    key = (_full_name(owner), name)
    if name not in vars(owner):
        raise AttributeError(
            f"{key[0]} has no {name} of its own to rebind: stock is not the version this overlay was made for"
        )
    if key in _rebound:
        raise RuntimeError(f"{key[0]}.{name} is rebound already, to {_rebound[key][1]!r}: one overlay must give way")
    old = vars(owner)[name]
    if isinstance(old, type) and isinstance(new, type) and issubclass(new, old) and _names_itself_in_super(old):
        raise RuntimeError(
            f"{key[0]}.{name} calls super({old.__name__}, self), which would recurse: override the methods instead"
        )
    setattr(owner, name, new)
    _rebound[key] = (owner, new)


def lost_rebindings() -> list[str]:
    """Full names that were rebound and mean something else by now."""
    return sorted(f"{key[0]}.{key[1]}" for key, (owner, new) in _rebound.items() if vars(owner).get(key[1]) is not new)


def _full_name(owner: ModuleType | type) -> str:
    return owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"


def _names_itself_in_super(cls: type) -> bool:
    """Whether a method calls super with its class by name: the two are loaded one after the other."""
    for value in vars(cls).values():
        function = getattr(value, "__func__", value)
        if isinstance(function, FunctionType):
            steps = [
                (step.opname, step.argval) for step in dis.get_instructions(function) if step.opname not in _NO_STEP
            ]
            if (("LOAD_GLOBAL", "super"), ("LOAD_GLOBAL", cls.__name__)) in itertools.pairwise(steps):
                return True
    return False
