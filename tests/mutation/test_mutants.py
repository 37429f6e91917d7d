"""The runner itself, on a toy module whose mutants are listed by hand."""

import ast
import gc
import importlib.util
import time

import pytest
from mutants import mutants, mutated
from reached import in_child, say
from run import Exchange

TOY = '''"""A toy."""
from functools import lru_cache
LIMIT = 7
def clamp(x: int, low: int = 2) -> int:
    """Return x, not below low."""
    assert x != 11
    if x < low:
        raise ValueError(f"{x} is below {low}")
    return x - 1
class Box:
    @property
    def full(self) -> bool:
        return not self.items and True
    def __repr__(self) -> str:
        return "Box" + "!"
@lru_cache
def double(x: int):
    for _ in (1,):
        break
    return x * 2
'''

EXPECTED = [
    ("", "7 -> 8"),
    ("", "2 -> 3"),
    ("clamp", "x < low -> False"),
    ("clamp", "x < low -> True"),
    ("clamp", "x < low -> x <= low"),
    ("clamp", "raise ValueError(f'{x} is below {low}') -> pass"),
    ("clamp", "return x - 1 -> return None"),
    ("clamp", "return x - 1 -> return (x - 1) * 0"),
    ("clamp", "x - 1 -> x + 1"),
    ("clamp", "x - 1: 1 -> 2"),
    ("Box.full", "return not self.items and True -> return None"),
    ("Box.full", "return not self.items and True -> return not (not self.items and True)"),
    ("Box.full", "not self.items and True -> not self.items or True"),
    ("Box.full", "not self.items -> self.items"),
    ("Box.full", "not self.items and True: True -> False"),
    ("double", "(1,): 1 -> 2"),
    ("double", "break -> continue"),
    ("double", "return x * 2 -> return None"),
    ("double", "x * 2 -> x / 2"),
    ("double", "x * 2: 2 -> 3"),
]


def mutant(change):
    (match,) = (m for m in mutants(TOY) if m.change == change)
    return match


@pytest.fixture
def toy(tmp_path):
    path = tmp_path / "costgraph_toy.py"
    path.write_text(TOY)
    spec = importlib.util.spec_from_file_location("costgraph_toy", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    gc.freeze()  # conftest freezes as well, before any mutant runs
    yield module, Exchange(path)
    gc.unfreeze()


def test_toy_mutants_equal_the_list():
    assert [(m.function, m.change) for m in mutants(TOY)] == EXPECTED


def test_mutants_are_single_changes_with_their_line():
    plain = ast.dump(ast.parse(TOY))
    rows = [row.strip() for row in TOY.splitlines()]
    seen = {ast.dump(mutated(TOY, m)) for m in mutants(TOY)}
    assert plain not in seen
    assert len(seen) == len(EXPECTED)
    for m in mutants(TOY):
        assert m.code == rows[m.lines[1] - 1]


def test_exchange_replaces_functions_and_clears_caches(toy):
    module, exchange = toy
    assert (module.clamp(5), module.double(3)) == (4, 6)
    double = module.double
    assert exchange(mutant("x - 1 -> x + 1"))
    assert exchange(mutant("x * 2: 2 -> 3"))
    assert (module.clamp(5), double(3)) == (6, 9)
    box = module.Box()
    box.items = [1]
    assert not box.full
    assert exchange(mutant("not self.items -> self.items"))
    assert box.full


def test_missing_functions_are_reported(toy):
    module, exchange = toy
    del module.clamp
    exchange.functions = [f for f in exchange.functions if f.__name__ != "clamp"]
    assert not exchange(mutant("x - 1 -> x + 1"))


def test_child_returns_status_and_output():
    def speaks():
        say("found")
        return 3

    assert in_child(speaks) == (3, "found")
    assert in_child(lambda: time.sleep(29) or 0, seconds=0.05)[0] < 0
