"""Import order: declare -> transform -> derive -> bind -> show | compare, read from the imports themselves."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import costgraph

# the package that is tested, in a checkout or installed from a wheel
ROOT = Path(costgraph.__file__).resolve().parent

# From the bottom up. A module imports from its own layer and from those above it in this list; "ops.*" stands for
# every module of that package which no other line names. A new module belongs in the lowest layer that it can be in.
LAYERS: list[tuple[str, ...]] = [
    ("errors", "interruption"),
    ("symbols",),
    ("text_file",),  # reads and writes files, knows nothing of what is in them
    ("generators",),
    ("polynomial",),
    ("door",),
    ("sampling",),
    ("dominance",),
    ("pruning",),
    ("conditions",),
    ("carried",),
    ("extremum",),
    ("grammar", "pattern"),
    ("dtypes", "units"),
    ("hardware",),  # reads device files, knows no graph
    ("layout",),
    ("tensor",),
    ("arguments",),
    ("op",),
    ("domain", "reach", "rules"),
    ("checks",),
    ("scopes",),
    ("changes",),
    ("graph",),
    ("sizes",),
    ("ops.*",),
    (
        "nn",
        "losses",
        "rotary",
        "attention",
        "cross_attention",
        "embeddings",
        "moe",
        "latent",
        "conv",
        "recurrent",
        "cells",
        "layers",
        "norms",
        "resizing",
        "recommendation",
        "vision",
        "windows",
    ),
    ("vjp.*",),
    ("optimizers.*",),
    ("attribute_types", "attributes", "reader", "io"),
    ("transforms.*",),
    ("sweep", "bind"),
    ("analysis.*",),
    ("checkpointing", "planning.*"),
    ("models.*",),
    ("torch.*",),  # run, trace and measure: what torch is needed for
    ("report.*",),
    ("cli", "testing.*"),
    ("__main__",),
]
# The zoo is written with public names alone, so that a user's model can be written in the same way; its registry is
# part of the library.
ZOO_EXCEPT = {
    "models", "models.registry", "models.config", "models.config_file", "models.defaults", "models.family",
    "models.published", "models.quantized",
}  # fmt: skip
# `from costgraph import ...` counts as an import of this: the package is complete once its zoo is.
PACKAGE = "models"
# Heavy or optional: not loaded by `import costgraph`.
NOT_LOADED = ("torch", "matplotlib", "typer", "rich")


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def layer(module: str) -> int | None:
    for i, names in enumerate(LAYERS):
        if module in names:
            return i
    for i, names in enumerate(LAYERS):
        if any(n.endswith(".*") and (module == n[:-2] or module.startswith(n[:-1])) for n in names):
            return i
    return None


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


def imports(module: str, source: str) -> set[str]:
    """Modules of the package that a module imports, at any level of nesting; "" is the package itself."""
    tree = ast.parse(source)
    skipped = type_checking_only(tree)
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


IMPORTS = {m: imports(m, p.read_text(encoding="utf-8")) for m, p in MODULES.items()}


@pytest.mark.parametrize("module", [m for m in MODULES if m])
def test_every_module_is_in_a_layer(module):
    assert layer(module) is not None, f"costgraph.{module} is new: add it to LAYERS in {Path(__file__).name}"


@pytest.mark.parametrize("module", [m for m in MODULES if m and not m.startswith("models")])
def test_a_module_imports_from_its_own_or_earlier_layers(module):
    here = layer(module)
    later = sorted(
        f"costgraph.{n or '(the package itself)'}"
        for n in IMPORTS[module]
        if here is not None and (layer(n or PACKAGE) or 0) > here
    )
    assert not later, f"costgraph.{module} imports from later stages: {', '.join(later)}"


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("models.") and m not in ZOO_EXCEPT])
def test_the_zoo_uses_public_names_alone(module):
    private = sorted(n for n in IMPORTS[module] if n and not n.startswith("models"))
    assert not private, f"costgraph.{module} imports {private}, expected 'import costgraph as cg' alone"


def test_no_import_cycle():
    def cycle(module, path):
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        for n in sorted(IMPORTS[module] - {""}):
            found = cycle(n, [*path, module])
            if found:
                return found
        done.add(module)
        return None

    done: set[str] = set()
    for module in MODULES:
        # the zoo imports the finished package, which names the zoo: that is no cycle of modules being made
        if module:
            found = cycle(module, [])
            assert not found, " -> ".join(found)


def test_every_line_of_the_layers_names_something():
    known = {f"{m.split('.')[0]}.*" for m in MODULES if "." in m} | set(MODULES)
    assert [n for names in LAYERS for n in names if n not in known] == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from .errors import A", {"errors"}),
        ("from . import errors, graph", {"errors", "graph"}),
        ("def f():\n    from .graph import Graph", {"graph"}),
        ("import costgraph.graph", {"graph"}),
        ("from costgraph import Graph", {""}),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .graph import Graph", set()),
        ("import numpy", set()),
    ],
)
def test_the_walk_sees_every_form_of_import(source, expected):
    assert imports("bind", source) == expected


def test_the_walk_sees_relative_imports_of_a_package():
    assert imports("ops.einsum", "from ..graph import Graph\nfrom .layout import view") == {"graph", "ops.layout"}


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
    assert second.endswith("expected an installed torch: pip install torch")
