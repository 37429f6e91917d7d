"""Import order: declare -> transform -> derive -> bind -> show | compare, read from the imports themselves."""

import ast
import importlib
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import networkx as nx
import pytest
from each import each

import costgraph
from costgraph.ops.registry import KINDS

# the package under test, in a checkout or installed from a wheel
ROOT = Path(costgraph.__file__).resolve().parent

# Lowest layer first. A module imports only from its own package and the packages above it in this list.
ROOMS = (
    "errors",
    "interruption",
    "algebra",
    "text_file",  # file I/O without knowledge of the contents
    "notation",
    "dtypes",
    "hardware",  # device files, without knowledge of graphs
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
    "torch",  # run, trace and measure: everything that needs torch
    "report",
    "cli",
    "testing",
    "__main__",
)
#: Modules allowed at the top level; new modules belong in a subpackage.
MOST_ENTRIES = 24
# The zoo uses public names only, so that user models can be written in the same way; its registry belongs to the
# library.
ZOO_EXCEPT = {
    "models", "models.registry", "models.config", "models.family", "models.gguf_config",
}  # fmt: skip
# `from costgraph import ...` counts as importing this: the package is complete once its zoo is loaded.
PACKAGE = "models"
# Heavy or optional: `import costgraph` must not load these.
NOT_LOADED = (
    "torch",
    "matplotlib",
    "typer",
    "rich",
    "xarray",
    "dask",
    "distributed",
    "tomllib",
    "sympy.tensor.tensor",  # loaded by the first sum, which takes 80 ms
    "costgraph.analysis",  # analyses load on first use
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
    paths = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


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
    """Resolve a dotted name inside the package to the module that defines it."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def imports(module: str, source: str, *, types: bool = True) -> set[str]:
    """Return the package modules that a module imports, at any nesting level; "" is the package itself.

    `types` includes imports used by annotations only.
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


def main_names(package: str) -> list[tuple[str, str]]:
    """Return the names that a package's docstring lists, each with its module."""
    lines = (ast.get_docstring(parsed(MODULES[package].read_text(encoding="utf-8"))) or "").splitlines()
    rows = [re.findall(r"`(\w+)`", line) for line in lines if line.startswith("- `")]
    return [(f"{package}.{module}", name) for module, *names in rows for name in names]


@cache
def imported(module: str) -> set[str]:
    """Return a module's imports; read lazily, since collecting tests would otherwise parse the whole package."""
    return imports(module, MODULES[module].read_text(encoding="utf-8"))


def test_top_level_contains_subpackages_only():
    entries = {p.name for p in ROOT.iterdir() if p.suffix in (".py", ".typed") or (p / "__init__.py").exists()}
    assert len(entries) <= MOST_ENTRIES
    assert {e.removesuffix(".py") for e in entries} == {"__init__", "py.typed", *ROOMS}


def test_op_kinds_are_defined_in_ops():
    places = {name: kind.__module__ for name, kind in KINDS.items()}
    del places["repeat"]  # graphs query the carries of loops
    builtin = {name: place for name, place in places.items() if place.startswith("costgraph.")}
    assert {name: place for name, place in builtin.items() if not place.startswith("costgraph.ops.")} == {}
    assert {"einsum", "pool", "fused_update", "stacked"} <= set(builtin)


def listed(source: str) -> dict[str, tuple[str, ...]]:
    """Return names by module that a package imports under TYPE_CHECKING."""
    later = next(n for n in parsed(source).body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    found: dict[str, tuple[str, ...]] = {}
    for node in later.body:
        assert isinstance(node, ast.ImportFrom)
        names = tuple(a.name for a in node.names)
        for module, name in [(node.module, n) if node.module else (n, n) for n in names]:
            found[module] = (*found.get(module, ()), name)
    return found


@pytest.mark.parametrize("package", ["", "report"])
def test_lazy_imports_match_type_checking_imports(package):
    module = importlib.import_module(f"costgraph.{package}".rstrip("."))
    type_imports = {
        m: {*names} & {*module.__all__} for m, names in listed(MODULES[package].read_text(encoding="utf-8")).items()
    }
    later = {(m, n) for m, names in module._LATER.items() for n in names.split()}
    assert {(m, n) for m, names in type_imports.items() for n in names} == later


PACKAGES = [m for m, path in MODULES.items() if m and path.name == "__init__.py"]


@each("package", [p for p in PACKAGES if "__all__" not in MODULES[p].read_text(encoding="utf-8") and p != "cli"])
def test_packages_list_their_main_names(package):
    names = main_names(package)
    assert 1 <= len(names) <= 15
    missing = [n for n in names if not hasattr(importlib.import_module(f"costgraph.{n[0]}"), n[1])]
    assert not missing, f"costgraph.{package} lists {missing}, which do not exist"


@each("module", [m for m in MODULES if m and not m.startswith("models")])
def test_modules_import_only_from_allowed_layers(module):
    later = sorted(
        f"costgraph.{n or '(the package itself)'}" for n in imported(module) if place(n or PACKAGE) > place(module)
    )
    assert not later, f"costgraph.{module} imports from later rooms: {', '.join(later)}"


@each("module", [m for m in MODULES if m.startswith("models.") and m not in ZOO_EXCEPT])
def test_zoo_uses_public_names_only(module):
    private = sorted(n for n in imported(module) if n and not n.startswith("models"))
    assert not private, f"costgraph.{module} imports {private}, expected 'import costgraph as cg' alone"


def import_cycles(arrows):
    """Return import cycles. The zoo imports the finished package, which names the zoo: that is no cycle."""
    graph = nx.DiGraph((m, n) for m, found in arrows.items() for n in found if m and n)
    return [sorted(c) for c in nx.strongly_connected_components(graph) if len(c) > 1]


def test_imports_have_no_cycles():
    assert import_cycles({m: imported(m) for m in MODULES}) == []


def loads_torch(source):
    """Return whether a module imports torch directly, at any nesting level."""
    nodes = list(ast.walk(parsed(source)))
    names = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    names += [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom) and not n.level]
    return any(name.split(".")[0] == "torch" for name in names)


def test_torch_is_imported_in_its_subpackage_only():
    importers = {m for m, path in MODULES.items() if loads_torch(path.read_text(encoding="utf-8"))}
    assert importers, "nothing imports torch: the walk over the imports is broken"
    assert {m for m in importers if m.split(".")[0] != "torch"} == set()


@each("source", ["import torch", "def f():\n    from torch.nn import Module", "import torch.fx as fx"])
def test_every_torch_import_form_is_detected(source):
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
def test_every_import_form_is_detected(source, expected):
    assert imports("bind.evaluate", source) == expected


def test_annotation_only_imports_can_be_excluded():
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..ir.graph import Op"
    assert imports("bind.evaluate", source, types=False) == set()


def test_relative_imports_are_detected():
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
