"""Questions about the values of tensors: which of them a program asks only to stop with an error."""

from __future__ import annotations

import dis
import linecache
import sys
from bisect import bisect_right
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import sympy
import torch
from torch.utils._sympy.symbol import SymT, symbol_is_type

__all__ = ["answer"]

_TORCH = Path(torch.__file__).parent
# between a program and the question: how torch asks it, and the tracer
_ASKING = (
    *(str(_TORCH / name) for name in ("fx", "_subclasses", "utils", "_ops.py", "__init__.py", "_tensor.py")),
    str(Path(__file__).parent),
)
_ENDS = ("RAISE_VARARGS", "RERAISE")


def answer(question: sympy.Basic) -> bool | None:
    """Return the answer to a question about values after which a program goes on; None where both ways go on.

    An `assert`, or an `if` with nothing but a `raise` behind it, is a check: a trace takes it for passed. `max` and
    `min` of numbers choose between values, which no cost depends on.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_ASKING):
        frame = frame.f_back
    if frame is None:
        return None
    called = _called(frame)
    if called in ("max", "min") and all(symbol_is_type(s, SymT.UNBACKED_FLOAT) for s in question.free_symbols):
        return True
    return _passing(frame.f_code, frame.f_lasti, called == "bool")


@cache
def _passing(code: CodeType, at: int, called: bool) -> bool | None:
    """Return which answer does not lead to an error, None where both go on; `called` of what `bool` returns."""
    steps = list(dis.get_instructions(code))
    places = {step.offset: i for i, step in enumerate(steps)}
    i = bisect_right(steps, at, key=lambda step: step.offset) - 1 + called
    while steps[i].opname in ("TO_BOOL", "CACHE", "NOT_TAKEN"):
        i += 1
    name = steps[i].opname
    if "JUMP" not in name or not name.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    jumps = name.endswith("IF_TRUE")
    if _fails(steps, i + 1):
        return jumps
    return not jumps if _fails(steps, places[steps[i].argval]) else None


def _fails(steps: list[dis.Instruction], i: int) -> bool:
    """Whether from here an error is raised whatever happens: nothing is chosen before it."""
    for step in steps[i:]:
        if step.opname in _ENDS:
            return True
        if "JUMP" in step.opname or "RETURN" in step.opname or "YIELD" in step.opname:
            return False
    return False


def _called(frame: FrameType) -> str:
    """Return the name of the function of Python's own that is called just now, "" if none is."""
    step = [s for s in dis.get_instructions(frame.f_code) if s.offset <= frame.f_lasti][-1]
    where = step.positions
    if not step.opname.startswith("CALL") or where is None or where.lineno is None or where.col_offset is None:
        return ""
    text = linecache.getline(frame.f_code.co_filename, where.lineno).encode()[where.col_offset :]
    return text.partition(b"(")[0].decode()
