"""Import order: declare -> transform -> derive -> bind -> show | compare, read from the imports themselves."""

import ast
import importlib
import subprocess
import sys
from functools import cache
from pathlib import Path

import networkx as nx
import pytest
from each import each

import costgraph
from costgraph.ops.registry import KINDS

# the package that is tested, in a checkout or installed from a wheel
ROOT = Path(costgraph.__file__).resolve().parent

# From the ground up. A module imports from its own room and from those that stand above it here.
ROOMS = (
    "errors",
    "interruption",
    "algebra",
    "text_file",  # reads and writes files, knows nothing of what is in them
    "notation",
    "dtypes",
    "hardware",  # reads device files, knows no graph
    "ir",
    "bind",
    "ops",
    "nn",
    "optimizers",
    "files",
    "transforms",
    "analysis",
    "plan",
    "models",
    "torch",  # run, trace and measure: what torch is needed for
    "report",
    "cli",
    "testing",
    "__main__",
)
#: Entries that the top of the package may have; what is new belongs in a room.
MOST_ENTRIES = 24
# The zoo is written with public names alone, so that a user's model can be written in the same way; its registry is
# part of the library.
ZOO_EXCEPT = {
    "models", "models.registry", "models.config", "models.family", "models.gguf_config",
}  # fmt: skip
# `from costgraph import ...` counts as an import of this: the package is complete once its zoo is.
PACKAGE = "models"
# Heavy or optional: not loaded by `import costgraph`.
NOT_LOADED = (
    "torch",
    "matplotlib",
    "typer",
    "rich",
    "xarray",
    "dask",
    "distributed",
    "tomllib",
    "sympy.tensor.tensor",  # by the first sum that is made, and 80 ms of a second
    "costgraph.analysis",  # questions, when they are asked
    "costgraph.transforms",
    "costgraph.hardware",
    "costgraph.optimizers",
    "costgraph.files",
    "costgraph.plan",
    "costgraph.models.registry",
)


@cache
def parsed(source):
    return ast.parse(source)


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def place(module: str) -> int:
    return ROOMS.index(module.split(".")[0])


def type_checking_only(tree: ast.AST) -> set[int]:
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            inside |= {id(n) for part in node.body for n in ast.walk(part)}
    return inside


def resolve(name: str) -> str:
    """The module behind a dotted name inside the package: the name itself, or where it is defined."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def imports(module: str, source: str, *, types: bool = True) -> set[str]:
    """Modules of the package that a module imports, at any level of nesting; "" is the package itself.

    `types`: those that are imported for annotations alone too.
    """
    tree = parsed(source)
    skipped = set() if types else type_checking_only(tree)
    is_package = MODULES[module].name == "__init__.py"
    package = module.split(".") if is_package and module else module.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join(["costgraph", *up] if node.level else []) + ("." if node.level and node.module else "")
            base += node.module or ""
            names = [f"{base}.{a.name}" for a in node.names]
        else:
            continue
        found |= {resolve(n.partition(".")[2]) for n in names if n.split(".")[0] == "costgraph"}
    return found - {module}


@cache
def imported(module: str) -> set[str]:
    """What a module imports, which is read when a test asks: collecting the tests would read the whole package."""
    return imports(module, MODULES[module].read_text(encoding="utf-8"))


def test_the_top_of_the_package_has_the_rooms_alone():
    entries = {p.name for p in ROOT.iterdir() if p.suffix in (".py", ".typed") or (p / "__init__.py").exists()}
    assert len(entries) <= MOST_ENTRIES
    assert {e.removesuffix(".py") for e in entries} == {"__init__", "py.typed", *ROOMS}


def test_what_the_library_knows_of_a_kind_of_op_stands_in_ops():
    places = {name: kind.__module__ for name, kind in KINDS.items()}
    del places["repeat"]  # graphs ask of loops what they hand on
    own = {name: place for name, place in places.items() if place.startswith("costgraph.")}
    assert {name: place for name, place in own.items() if not place.startswith("costgraph.ops.")} == {}
    assert {"einsum", "pool", "fused_update", "stacked"} <= set(own)


def listed(source: str) -> dict[str, tuple[str, ...]]:
    """Names by module that a package imports for those who read types."""
    later = next(n for n in parsed(source).body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    found: dict[str, tuple[str, ...]] = {}
    for node in later.body:
        assert isinstance(node, ast.ImportFrom)
        names = tuple(a.name for a in node.names)
        for module, name in [(node.module, n) if node.module else (n, n) for n in names]:
            found[module] = (*found.get(module, ()), name)
    return found


@pytest.mark.parametrize("package", ["", "report"])
def test_what_is_imported_later_is_what_readers_of_types_see(package):
    made = importlib.import_module(f"costgraph.{package}".rstrip("."))
    found = {m: {*names} & {*made.__all__} for m, names in listed(MODULES[package].read_text(encoding="utf-8")).items()}
    later = {(m, n) for m, names in made._LATER.items() for n in names.split()}
    assert {(m, n) for m, names in found.items() for n in names} == later


@each("module", [m for m in MODULES if m and not m.startswith("models")])
def test_a_module_imports_from_its_own_room_and_those_above_it(module):
    later = sorted(
        f"costgraph.{n or '(the package itself)'}" for n in imported(module) if place(n or PACKAGE) > place(module)
    )
    assert not later, f"costgraph.{module} imports from later rooms: {', '.join(later)}"


@each("module", [m for m in MODULES if m.startswith("models.") and m not in ZOO_EXCEPT])
def test_the_zoo_uses_public_names_alone(module):
    private = sorted(n for n in imported(module) if n and not n.startswith("models"))
    assert not private, f"costgraph.{module} imports {private}, expected 'import costgraph as cg' alone"


def circles(arrows):
    """Circles of imports; the zoo imports the finished package, which names the zoo: no module waits for another."""
    graph = nx.DiGraph((m, n) for m, found in arrows.items() for n in found if m and n)
    return [sorted(c) for c in nx.strongly_connected_components(graph) if len(c) > 1]


def test_no_module_waits_for_another_that_waits_for_it():
    assert circles({m: imported(m) for m in MODULES}) == []


def loads_torch(source):
    """Whether a module imports torch itself, at any level of nesting."""
    nodes = list(ast.walk(parsed(source)))
    names = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    names += [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom) and not n.level]
    return any(name.split(".")[0] == "torch" for name in names)


def test_torch_is_imported_in_its_room_alone():
    found = {m for m, path in MODULES.items() if loads_torch(path.read_text(encoding="utf-8"))}
    assert found, "nothing imports torch: the walk over the imports is broken"
    assert {m for m in found if m.split(".")[0] != "torch"} == set()


@each("source", ["import torch", "def f():\n    from torch.nn import Module", "import torch.fx as fx"])
def test_the_walk_sees_every_import_of_torch(source):
    assert loads_torch(source)
    assert not loads_torch("from ..torch import trace\nfrom . import torch\nimport torchvision")


@each(
    ("source", "expected"),
    [
        ("from ..errors import A", {"errors"}),
        ("from .. import errors, models", {"errors", "models"}),
        ("def f():\n    from ..ir.graph import Graph", {"ir.graph"}),
        ("import costgraph.ir.graph", {"ir.graph"}),
        ("from costgraph import Graph", {""}),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..ir.graph import Op", {"ir.graph"}),
        ("from .grid import sweep", {"bind.grid"}),
        ("import numpy", set()),
    ],
)
def test_the_walk_sees_every_form_of_import(source, expected):
    assert imports("bind.evaluate", source) == expected


def test_the_walk_can_leave_out_what_annotations_alone_need():
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..ir.graph import Op"
    assert imports("bind.evaluate", source, types=False) == set()


def test_the_walk_sees_relative_imports_of_a_package():
    assert imports("models", "from ..errors import A\nfrom .family import Family") == {"errors", "models.family"}


def test_import_loads_nothing_heavy():
    code = f"import sys, costgraph; print([m for m in {NOT_LOADED!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert done.stdout.strip() == "[]", done.stdout


def test_torch_is_optional():
    program = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import costgraph as cg
step = cg.training_step(cg.models.load("gpt2"), optimizer=cg.AdamW())
print(cg.param_count(step), cg.peak_memory(step, B=1, S=128) > 0)
try:
    import costgraph.torch
except cg.UnsupportedError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == "124439808 True"
    assert second.startswith("costgraph.torch: torch cannot be imported")
    assert second.endswith("): pip install torch")
