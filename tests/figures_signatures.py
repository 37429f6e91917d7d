"""Public signatures as figures, so that a changed name, parameter or default shows up.

Annotations are separate figures because they may contain private aliases.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import costgraph as cg

NAMESPACES = ("", "bind", "models", "nn", "ops", "optimizers", "plan", "testing", "torch")
#: Marks a name in the API reference that the package does not have.
MISSING = object()
REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
#: A directive that documents a name, or a row of a table of names.
DIRECTIVE = re.compile(
    r"(?:\.\. (?:autoclass|autofunction|autoexception|autodata|currentmodule):: |~?(?=[\w.]+$))([\w.]+)"
)


def public() -> dict[str, object]:
    """Return every public object by name: those in `__all__`, and those that only the API reference documents.

    The latter are keyed by class or function name without the module, which may change.
    """
    found: dict[str, object] = {}
    for place in NAMESPACES:
        module = importlib.import_module(f"costgraph.{place}".rstrip("."))
        names = getattr(module, "__all__", ())
        found |= {f"{place}.{name}".lstrip("."): getattr(module, name) for name in names}
    known = {id(value) for value in found.values()}
    for page in sorted(REFERENCE.glob("*.md")):
        module = cg.__name__
        for line in page.read_text(encoding="utf-8").splitlines():
            if (match := DIRECTIVE.match(line.strip())) is None:
                continue
            if "currentmodule" in line:
                module = match[1]
                continue
            value = _resolved(module, match[1])
            is_row = not line.strip().startswith("..")
            if not (is_row and value is MISSING) and (value is MISSING or id(value) not in known):
                found[f"documented.{match[1].rpartition('.')[2]}"] = value
    return found


def _resolved(module: str, name: str) -> object:
    """Find an object by a dotted name, absolute or relative to a module.

    Where a function and a module share a name, as `plan.preflight` does, the function is tried first.
    """
    path = name if name.startswith(cg.__name__) else f"{module}.{name}"

    def found(value: object, at: str, rest: list[str]) -> object:
        if not rest:
            return value
        path = f"{at}.{rest[0]}"
        result = found(getattr(value, rest[0]), path, rest[1:]) if hasattr(value, rest[0]) else MISSING
        if result is MISSING:
            with contextlib.suppress(ModuleNotFoundError):
                result = found(importlib.import_module(path), path, rest[1:])
        return result

    return found(cg, cg.__name__, path.split(".")[1:])


def _default(value: object) -> str:
    """Return a default as text without addresses and private names."""
    if inspect.isroutine(value) or "<factory>" in repr(value):
        return "..."
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def signature(value: object) -> tuple[str, str]:
    """Return parameters with defaults, and annotations separately."""
    try:
        given = inspect.signature(value)  # type: ignore[arg-type]  # only callables come here
    except (TypeError, ValueError):
        return "no signature", ""
    empty = inspect.Parameter.empty
    bare = [p.replace(annotation=empty) for p in given.parameters.values()]
    parts = [p.replace(default=empty if p.default is empty else _Text(_default(p.default))) for p in bare]
    annotations = [f"{p.name}: {p.annotation}" for p in given.parameters.values() if p.annotation is not empty]
    if given.return_annotation is not empty:
        annotations.append(f"return: {given.return_annotation}")
    return str(inspect.Signature(parts)), re.sub(r" at 0x[0-9a-f]+", "", "; ".join(annotations))


class _Text(str):
    """A default whose repr has no quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def members(kind: type) -> Iterator[tuple[str, object]]:
    """Yield public members, including those inherited from other costgraph classes."""
    names = {
        name
        for base in kind.__mro__
        if base.__module__.partition(".")[0] == cg.__name__
        for name in {*vars(base), *vars(base).get("__annotations__", {})}
    }
    for name in sorted(n for n in names if n[0] != "_"):
        yield name, inspect.getattr_static(kind, name, None)


def lines() -> Iterator[tuple[str, str]]:
    """Yield the name and signature for every public object and member."""
    for name, value in sorted(public().items()):
        if isinstance(value, ModuleType) or value is MISSING:
            yield name, "missing" if value is MISSING else "module"
        elif inspect.isclass(value):
            yield from _described(name, value, "class ")
            for member, found in members(value):
                bound = found.__func__ if isinstance(found, classmethod | staticmethod) else found
                if inspect.isfunction(bound):
                    yield from _described(f"{name}.{member}", bound, "")
                elif isinstance(value, enum.EnumMeta):
                    yield f"{name}.{member}", "member"
                else:
                    yield f"{name}.{member}", "property" if isinstance(found, property) else "attribute"
        elif callable(value):
            yield from _described(name, value, "")
        elif isinstance(value, dict):
            yield name, f"{len(value)} entries: {' '.join(sorted(k for k in value if isinstance(k, str)))}".rstrip(": ")
        else:
            yield name, f"{type(value).__name__} {value!r}" if isinstance(value, tuple | str | int) else "value"


def _described(name: str, value: object, prefix: str) -> Iterator[tuple[str, str]]:
    parameters, annotations = signature(value)
    yield name, f"{prefix}{parameters}"
    if annotations:
        yield f"{name} annotations", annotations
