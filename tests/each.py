"""Tables of fast cases: one test runs all of them, which avoids collection and setup costs."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

__all__ = ["each"]

#: Number of further failing cases to report after the first.
_MOST = 20


def each(names: str | Sequence[str], cases: Iterable[Any], ids: object = None) -> Callable[[Callable], Callable]:
    """Work as `pytest.mark.parametrize` within one test: run all cases, and name those that fail.

    The cases share fixtures.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    rows = [_values(case, len(names)) for case in cases]

    def decorate(test: Callable) -> Callable:
        @wraps(test)
        def over_all(**fixtures: Any) -> None:
            failed = []
            for row in rows:
                try:
                    test(**fixtures, **dict(zip(names, row, strict=True)))
                except Exception as error:
                    failed.append((error, row))
            if failed:
                error, _ = failed[0]
                for _, row in failed[:_MOST]:
                    told = (f"{name}={value!r}" for name, value in zip(names, row, strict=True))
                    error.add_note(f"with {', '.join(told)}")
                if len(failed) > _MOST:
                    error.add_note(f"and {len(failed) - _MOST} more of {len(rows)} cases")
                raise error

        given = inspect.signature(test)
        over_all.__signature__ = given.replace(parameters=[p for n, p in given.parameters.items() if n not in names])
        return over_all

    return decorate


def _values(case: Any, count: int) -> tuple[Any, ...]:
    """Return the values of a case or `pytest.param`; a case with a mark needs a separate test."""
    if hasattr(case, "marks"):
        if case.marks:
            raise ValueError(f"{case}: a mark, expected a test of its own, by pytest.mark.parametrize")
        return tuple(case.values)
    return (case,) if count == 1 else tuple(case)
