"""rebind: one stock name, once, and never one that would recurse."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "vllm_overrides/overlay/rebind.py"
STOCK = """
class Old:
    def __init__(self):
        super(Old, self).__init__()

class New:
    def __init__(self):
        super().__init__()
        self.other = New

    @classmethod
    def make(cls):
        return super(New, cls).__new__(cls)

class Fine:
    def __init__(self):
        super().__init__()
        self.kind = Fine

    def run(self):
        return "stock"

class Derived(Fine):
    pass

def helper():
    return "stock"

def caller():
    return helper(), Fine().run()
"""


@pytest.fixture
def rebinding() -> ModuleType:
    """The module, fresh: what it remembers is of one process."""
    spec = importlib.util.spec_from_file_location("rebind_under_test", SOURCE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("stock_under_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(SOURCE_OF_STOCK, module.__dict__)
    return module


SOURCE_OF_STOCK = compile(STOCK, "stock_under_test.py", "exec")


def test_callers_inside_stock_see_the_new_value(rebinding: ModuleType, stock: ModuleType) -> None:
    rebinding.rebind(stock, "helper", lambda: "ours")
    rebinding.rebind(stock.Fine, "run", lambda self: "ours too")
    assert stock.caller() == ("ours", "ours too")
    assert rebinding.lost_rebindings() == []


def test_missing_name_is_refused(rebinding: ModuleType, stock: ModuleType) -> None:
    with pytest.raises(AttributeError, match="stock_under_test has no gone of its own"):
        rebinding.rebind(stock, "gone", 1)
    with pytest.raises(AttributeError, match="stock_under_test.Derived has no run of its own"):
        rebinding.rebind(stock.Derived, "run", 1)
    assert not hasattr(stock, "gone")


def test_second_rebind_is_refused(rebinding: ModuleType, stock: ModuleType) -> None:
    rebinding.rebind(stock, "helper", 1)
    with pytest.raises(RuntimeError, match="stock_under_test.helper is rebound already, to 1"):
        rebinding.rebind(stock, "helper", 2)
    assert stock.helper == 1


@pytest.mark.parametrize(("name", "recurses"), [("Old", True), ("New", True), ("Fine", False)])
def test_class_that_names_itself_in_super(rebinding: ModuleType, stock: ModuleType, name: str, recurses: bool) -> None:
    old = getattr(stock, name)
    ours = type(name, (old,), {})
    if not recurses:
        rebinding.rebind(stock, name, ours)
        assert type(stock.Fine()) is ours
        return
    with pytest.raises(RuntimeError, match=rf"calls super\({name}, self\), which would recurse"):
        rebinding.rebind(stock, name, ours)
    assert getattr(stock, name) is old


def test_the_recursion_is_real(stock: ModuleType) -> None:
    stock.Old = type("Old", (stock.Old,), {})
    with pytest.raises(RecursionError):
        stock.Old()


def test_lost_rebinding_is_named(rebinding: ModuleType, stock: ModuleType) -> None:
    rebinding.rebind(stock, "helper", 1)
    stock.helper = 2
    assert rebinding.lost_rebindings() == ["stock_under_test.helper"]
