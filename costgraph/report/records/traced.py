"""Families of programs of plain torch: traced, which needs torch, where a record of them is predicted."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from typing import Annotated

from ...errors import UnsupportedError
from ...notation.records import one_of
from .case import Case, Run, family
from .record import Record, facts

_PHASES = {"forward": ("forward",), "backward": ("backward",), "full": ()}
#: Who runs the program as it is written; others bring kernels of their own.
_PLAIN = ("huggingface", "torch")


@dataclass(frozen=True)
class _Called:
    kernel: str
    provider: str
    mode: Annotated[str, one_of(_PHASES)]
    dtype: str = ""


@family("liger", subject="kernels")
def called(record: Record) -> Case:
    """Predict a call of plain torch and its backward pass, in eager mode; caches are flushed before each run."""
    given = facts(record, _Called)
    if given.provider not in _PLAIN:
        raise UnsupportedError(f"inputs: provider {given.provider!r} has kernels of its own, expected plain torch")
    if record.what == "peak memory":
        raise UnsupportedError("peak memory: what a benchmark keeps alive, and workspaces of CUDA, have no prediction")
    if find_spec("torch") is None:
        raise UnsupportedError("torch is not installed, expected it for a program that is traced")
    from ...torch.validating.published import PROGRAMS, traced

    if given.kernel not in PROGRAMS:
        raise UnsupportedError(f"inputs: kernel {given.kernel!r} has no plain program here, expected one that has")
    program, known = PROGRAMS[given.kernel], dict(record.inputs)
    sizes = program.bound(_with_heads(known))
    run = Run(traced(given.kernel, given.dtype), sizes, Fraction(1), _PHASES[given.mode])
    return Case((run,), subject=program.subject)


def _with_heads(known: dict[str, object]) -> dict[str, object]:
    """Return facts with the size of a head, which is that of all of them over their number."""
    whole, heads = known.get("hidden_size", known.get("H")), known.get("num_q_heads")
    if isinstance(whole, int) and isinstance(heads, int) and heads and whole % heads == 0:
        known.setdefault("head_dim", whole // heads)
    return known
