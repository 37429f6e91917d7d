"""What users call by name: `costgraph` itself, and its layers, further ops and questions of planning."""

import inspect

import costgraph as cg
from costgraph.notation.validation import GUARDED
from costgraph.report.collect import Report  # imported when a report is made

#: Modules whose `__all__` is public, inmost names first.
NAMESPACES = {"": cg, "nn.": cg.nn, "ops.": cg.ops, "plan.": cg.plan}
#: Everything public by its name without the module's.
PUBLIC = {name: getattr(module, name) for module in NAMESPACES.values() for name in module.__all__}
FUNCTIONS = {name: found for name, found in PUBLIC.items() if inspect.isfunction(found)}
#: What questions answer with, and takes no name of a public module; all modules are loaded by now.
assert Report in GUARDED
RECORDS = {kind.__name__: kind for kind in GUARDED if kind not in PUBLIC.values()}
#: By the name that users write behind `costgraph.`.
DOTTED = {f"{place}{name}" for place, module in NAMESPACES.items() for name in module.__all__}
DOTTED |= {f"{kind.__module__.removeprefix('costgraph.')}.{kind.__name__}" for kind in RECORDS.values()}
