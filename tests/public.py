"""Names that users import: `costgraph` itself, its layers, further ops, and planning questions."""

import inspect

import costgraph as cg
from costgraph.notation.validation import GUARDED
from costgraph.report.collect import Report  # imported when a report is made

#: Modules with a public `__all__`, innermost names first.
NAMESPACES = {"": cg, "nn.": cg.nn, "ops.": cg.ops, "plan.": cg.plan}
#: Every public object by its name without the module.
PUBLIC = {name: getattr(module, name) for module in NAMESPACES.values() for name in module.__all__}
FUNCTIONS = {name: found for name, found in PUBLIC.items() if inspect.isfunction(found)}
#: Result classes; they take no name of a public module, and all modules are loaded by now.
assert Report in GUARDED
RECORDS = {kind.__name__: kind for kind in GUARDED if kind not in PUBLIC.values()}
#: Public objects by the dotted name after `costgraph.`.
DOTTED = {f"{place}{name}" for place, module in NAMESPACES.items() for name in module.__all__}
DOTTED |= {f"{kind.__module__.removeprefix('costgraph.')}.{kind.__name__}" for kind in RECORDS.values()}
