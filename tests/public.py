"""What users call by name: `costgraph` itself, and its layers, further ops and questions of planning."""

import inspect
from importlib import import_module

import costgraph as cg

#: Modules whose `__all__` is public, inmost names first.
NAMESPACES = {"": cg, "nn.": cg.nn, "ops.": cg.ops, "plan.": cg.plan}
#: Everything public by its name without the module's.
PUBLIC = {name: getattr(module, name) for module in NAMESPACES.values() for name in module.__all__}
FUNCTIONS = {name: found for name, found in PUBLIC.items() if inspect.isfunction(found)}
#: What questions answer with.
RECORDS = {n: getattr(import_module(f"costgraph.{place}"), n) for place, names in cg._RECORDS.items() for n in names}
#: By the name that users write behind `costgraph.`.
DOTTED = {f"{place}{name}" for place, module in NAMESPACES.items() for name in module.__all__}
DOTTED |= {f"{place}.{name}" for place, names in cg._RECORDS.items() for name in names}
